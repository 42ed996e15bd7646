"""wrap and Guard: the conductor. Asks the kernels, decides, and hands the record on."""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch

from . import kernels
from .amp import Scaling
from .clipping import ClipPolicy, GlobalNorm
from .diagnosis import RULES
from .errors import AlreadyGuardedError, NonFiniteGradientsError, NotGuardedError
from .history import NUM_DEFERRED, TrainingHistory
from .hooks import Attachment
from .naming import Namer
from .proxies import innermost, inwards
from .recorder import Recorder
from .report import Report, build_report
from .sharding import refuse_sharding_model, refuse_shards
from .stats import StepStats, TensorStats

_log = logging.getLogger("fastguard")
_Wrapped = TypeVar("_Wrapped")
EQUAL_NORMS_RUN = 10  # from so many on, the rule "already-clipped" is asked
_HOW_TO_GUARD = (
    "Guard it with `optimizer = fastguard.wrap(optimizer, model)`; "
    "a pickled or deep-copied optimizer has lost its guard."
)


class _NoGuard:
    """What `optimizer.guard` is where none was set: the guard of the optimizer that this one wraps, as accelerate's
    does, or an error that says how to guard it, as for a copy."""

    def __get__(self, optimizer: Any, owner: type) -> Any:
        return self if optimizer is None else Guard.of(optimizer)


class _Decision:
    """What was decided for one step; shared by all optimizers under one guard until each has taken its step."""

    def __init__(self, record: StepStats, scale: float | None) -> None:
        self.record = record
        self.scale = scale
        self.taken: set[int] = set()


class Guard:
    """Watches the gradients of one optimizer, or of several that share one norm. Made by `fastguard.wrap`.

    Attributes:
        history: bounded record of the run, which `report` reads.
        skip_nonfinite: whether steps with NaN or Inf gradients are skipped.
        max_consecutive_skips: how many skipped steps in a row raise.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        model: torch.nn.Module | None,
        *,
        proxies: Sequence[Any],
        clip: ClipPolicy | None,
        skip_nonfinite: bool,
        max_consecutive_skips: int,
        sinks: Iterable[Any],
        backend: str,
    ) -> None:
        self.clip = clip
        self.skip_nonfinite = skip_nonfinite
        self.max_consecutive_skips = max_consecutive_skips
        self.backend = kernels.resolve_backend(backend)
        self._proxies = [weakref.ref(proxy) for proxy in proxies]  # they own the optimizer, which owns the guard
        self._namer = Namer(model)
        self._namer.check(optimizers)
        self._names: tuple[str, ...] = ()
        self._fingerprint: int | None = None
        self._step = 0
        self._skipped_run: list[int] = []
        self._skipped_tensors: dict[str, None] = {}  # an ordered set
        self._decision: _Decision | None = None
        self._told_already_clipped = False
        self.recorder = Recorder(sinks)
        self._attachments = [Attachment(self, optimizer, self._proxies) for optimizer in optimizers]
        # What is held back must reach the sinks also when the guard is dropped or the interpreter ends.
        weakref.finalize(self, self.recorder.flush)

    @staticmethod
    def of(optimizer: Any) -> Guard:
        """The guard of `optimizer`, also of one inside the wrappers of accelerate and Lightning.

        Raises:
            NotGuardedError: there is none; says how to guard it.
        """
        for layer in inwards(optimizer):
            guard = getattr(layer, "__dict__", {}).get("guard")
            if isinstance(guard, Guard):
                return guard
        raise NotGuardedError(f"this {type(optimizer).__name__} is not guarded. {_HOW_TO_GUARD}")

    @property
    def history(self) -> TrainingHistory:
        """The run so far, without the step just taken, to which `observe` may still add."""
        return self.recorder.history

    @property
    def last(self) -> StepStats | None:
        """The newest record, or None before the first step. Never blocks; on the CPU it is of the step just taken."""
        return self.recorder.last

    def observe(self, loss: Any = None, val_loss: Any = None) -> None:
        """Adds a loss to the step just taken.

        Args:
            loss, val_loss: a float, or a tensor of one element.

        Raises:
            RuntimeError: no step was taken yet, or its record was handed over by `flush`.
            ValueError: a tensor of more than one element.

        Cost: no sync for a CPU tensor or a float.
        """
        self.recorder.observe(loss, val_loss)

    def flush(self) -> None:
        """Hands the record of the step just taken to history and sinks. `observe` can no longer add to it."""
        self.recorder.flush()

    def report(self) -> Report:
        """What the run looks like so far, the step just taken included: status, findings, recommendations, numbers."""
        return build_report(self.recorder.history_with_last(), sinks_lost=self.recorder.lost())

    def detach(self) -> None:
        """Leaves the optimizer as it was before `wrap`. Records stay readable; sinks stay open."""
        self.flush()
        for attachment in self._attachments:
            attachment.remove()
            optimizer = attachment._optimizer()
            if optimizer is not None:
                optimizer.__dict__.pop("guard", None)
        for proxy in (ref() for ref in self._proxies):
            if proxy is not None:
                proxy.__dict__.pop("guard", None)
        self._attachments = []

    def close(self) -> None:
        """Hands over what is held back and closes the sinks. Call it at the end of training."""
        self.recorder.close()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: step number, run of skips, history, clip policy. Plain data, fit for torch.save.

        The step just taken is in it; `observe` may still add to that step, for this run only.
        """
        return {
            "version": 1,
            "step": self._step,
            "skipped_run": list(self._skipped_run),
            "skipped_tensors": list(self._skipped_tensors),
            "history": self.recorder.history_with_last().state_dict(),
            "clip": None if self.clip is None else self.clip.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`, which came from `state_dict`.

        Raises:
            ValueError: `state` has another version or lacks an entry; nothing is changed then.
        """
        needed = {"version", "step", "skipped_run", "skipped_tensors", "history", "clip"}
        missing = needed - state.keys()
        if missing or state["version"] != 1:
            problem = f"without {sorted(missing)}" if missing else f"of version {state['version']!r}"
            raise ValueError(f"`state` must come from Guard.state_dict (version 1), got one {problem}")
        self.flush()
        self.history.load_state_dict(state["history"])
        self._step = int(state["step"])
        self._skipped_run = list(state["skipped_run"])
        self._skipped_tensors = dict.fromkeys(state["skipped_tensors"])
        if self.clip is not None and state["clip"] is not None:
            self.clip.load_state_dict(state["clip"])

    def judge(self, caller: Attachment, scaling: Scaling, *, first: bool, loss: float | None) -> tuple[bool, float]:
        """Whether `caller` must skip its step, and what it must multiply its gradients by.

        One pass over the gradients of all optimizers, when the first of them steps; the others follow its decision.
        """
        if len(self._attachments) == 1:
            record = self._decide(caller, scaling, first, loss)
            return self._action(caller, scaling, record)
        decision = self._decision
        if decision is None or not first or id(caller) in decision.taken:
            decision = self._decision = _Decision(self._decide(caller, scaling, first, loss), scaling.scale)
        elif decision.scale != scaling.scale:
            raise RuntimeError(
                "optimizers under one guard must have their gradients scaled alike when they step: got scale "
                f"{scaling.scale} after {decision.scale}. Call scaler.unscale_ on all of them, or on none, before."
            )
        decision.taken.add(id(caller))
        if len(decision.taken) == len(self._attachments):
            self._decision = None
        return self._action(caller, scaling, decision.record)

    def _action(self, caller: Attachment, scaling: Scaling, record: StepStats) -> tuple[bool, float]:
        unscale = 1.0 if scaling.fused else scaling.inverse
        skip = (record.skipped and caller.can_skip) or scaling.found_inf
        return skip, record.clip_coef * unscale

    def scale(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Multiplies the gradients of `optimizer` in place."""
        gradients, _, _ = kernels.collect_gradients([group["params"] for group in optimizer.param_groups])
        if gradients:
            kernels.run_scale(gradients, factor, self.backend)

    def _decide(self, caller: Attachment, scaling: Scaling, first: bool, loss: float | None) -> StepStats:
        optimizers = [attachment.optimizer for attachment in self._attachments]
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        table, total, positions, fingerprint = kernels.gradient_stats(groups, self.backend, scaling.inverse)
        if fingerprint != self._fingerprint:
            refuse_shards(groups)
            self._names = self._namer.names(optimizers)
            self._fingerprint = fingerprint
        names = self._names
        tensors = TensorStats(table, names if positions is None else lambda: [names[i] for i in positions], total)
        norm = tensors.total_norm()
        finite = math.isfinite(norm)
        coefficient = self.clip.coefficient(norm) if self.clip is not None and finite else 1.0
        skipped = ((self.skip_nonfinite and not finite) or scaling.found_inf) and caller.can_skip
        record = StepStats(
            step=self._step if first else self._step - 1,
            tensors=tensors,
            clip_coef=1.0 if skipped else coefficient,
            skipped=skipped,
            loss=loss,
            lr=_learning_rate(optimizers[0]),
            loss_scale=scaling.scale,
        )
        if first:
            self.recorder.begin(record)
            self._step += 1
            self._say_already_clipped()
            if not finite:
                self._say_nonfinite(record, scaling)
            self._count_skip(record)
        elif self.recorder.last is not None:
            self._revise(self.recorder.last, record, scaling)
        return record

    def _revise(self, kept: StepStats, record: StepStats, scaling: Scaling) -> None:
        """Another evaluation within one step: its first bad gradients are what to keep, and the last one decides."""
        if kept.is_finite and not record.is_finite:
            kept = record
            self._say_nonfinite(record, scaling)
        self.recorder.replace(dataclasses.replace(kept, skipped=record.skipped))
        self._count_skip(record)

    def _count_skip(self, record: StepStats) -> None:
        run, step = self._skipped_run, record.step
        if run and run[-1] < step - 1:  # a step was taken in between
            run.clear()
            self._skipped_tensors.clear()
        if not record.skipped:
            if run and run[-1] == step:  # an earlier evaluation of this step was bad
                run.pop()
            return
        if not run or run[-1] != step:
            run.append(step)
        self._skipped_tensors.update(dict.fromkeys(record.nonfinite))
        if len(self._skipped_run) >= self.max_consecutive_skips:
            self.flush()
            raise NonFiniteGradientsError(self._skipped_run, list(self._skipped_tensors))

    def _say_nonfinite(self, record: StepStats, scaling: Scaling) -> None:
        level = logging.INFO if scaling.from_scaler else logging.WARNING  # a scaler finds its scale by overflowing
        names = record.nonfinite
        count = f"{len(names)} tensor" + ("" if len(names) == 1 else "s")
        where = f"first in {names[0]!r}, {count} in all" if names else "only their norm overflowed"
        what = "skipped" if record.skipped else "taken all the same"
        _log.log(level, "step %d: gradients are not finite (%s); the step was %s", record.step, where, what)

    def _say_already_clipped(self) -> None:
        if self._step % NUM_DEFERRED or self._told_already_clipped or self.history.equal_run < EQUAL_NORMS_RUN:
            return
        finding = RULES["already-clipped"](self.history)
        if finding is not None:
            self._told_already_clipped = True
            _log.warning("%s %s", finding.summary, finding.recommendation)


def _learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    lr = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    return None if lr is None else float(lr)


def _clip_policy(max_norm: float | None, clip: ClipPolicy | None) -> ClipPolicy | None:
    if max_norm is not None and clip is not None:
        raise ValueError("`max_norm` and `clip` must not both be given: max_norm=x is short for clip=GlobalNorm(x)")
    if max_norm is not None:
        return GlobalNorm(max_norm)
    if clip is not None and not callable(getattr(clip, "coefficient", None)):
        raise TypeError(f"`clip` must be a clip policy such as GlobalNorm(1.0), got {clip!r}")
    return clip


def wrap(
    optimizer: _Wrapped,
    model: torch.nn.Module | None = None,
    *,
    max_norm: float | None = None,
    clip: ClipPolicy | None = None,
    skip_nonfinite: bool = True,
    max_consecutive_skips: int = 25,
    sinks: Iterable[Any] = (),
    backend: str = "auto",
) -> _Wrapped:
    """Guards `optimizer` in place and returns it: the same object, with its `Guard` as `optimizer.guard`.

    From then on `optimizer.step()` reads the gradients once: it records their statistics, clips them, and leaves
    parameters and state untouched if they are not finite. While nothing is clipped or skipped, training is
    bit-identical to training without the guard.

    Args:
        optimizer: any torch.optim.Optimizer, or accelerate's or Lightning's wrapper of one; or a list of optimizers
            that share one norm and one decision (Muon with AdamW), which is then returned. All of them must step
            after each backward pass: the decision is taken when the first of them does.
        model: where tensor names come from. Without it names are the optimizer's own (`named_parameters`) or
            `group0.param3`.
        max_norm: largest total 2-norm let through; short for `clip=GlobalNorm(max_norm)`.
        clip: a clip policy.
        skip_nonfinite: skip steps whose gradients hold NaN or Inf. Not with LBFGS, which has no step without gradients.
        max_consecutive_skips: so many skipped steps in a row raise NonFiniteGradientsError.
        sinks: where records go: `JsonlSink`, `MemorySink`, any object with `write(record)`, or a function.
        backend: "auto" or a name from `fastguard.backends()`.

    Raises:
        ValueError: `max_norm` is not > 0; the model has none of the optimizer's parameters; an unknown backend.
        AlreadyGuardedError: the optimizer has a guard.
        BackendUnavailableError: the backend cannot run here.
        NonFiniteGradientsError: from `step`, after `max_consecutive_skips`; parameters are untouched.

    Cost a step on the CPU: one read of the gradients; one more read and write only if they are clipped.

    >>> import torch, fastguard
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, max_norm=1.0)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.guard.last.tensors["weight"].norm ** 2
    2.0000000000000004
    """
    given: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not given:
        raise ValueError("`optimizer` must be an optimizer or a list of at least one, got an empty list")
    if not isinstance(max_consecutive_skips, int) or max_consecutive_skips < 1:
        raise ValueError(f"`max_consecutive_skips` must be an integer >= 1, got {max_consecutive_skips!r}")
    inner = [innermost(o) for o in given]
    policy = _clip_policy(max_norm, clip)
    if len(set(map(id, inner))) != len(inner):
        raise ValueError("`optimizer` must be a list of different optimizers, got one of them twice")
    for o in given:
        if any("guard" in getattr(layer, "__dict__", {}) for layer in inwards(o)):
            raise AlreadyGuardedError(
                f"this {type(o).__name__} is guarded already. Use optimizer.guard, or optimizer.guard.detach() first."
            )
    refuse_sharding_model(model)
    groups = [group["params"] for o in inner for group in o.param_groups]
    refuse_shards(groups)
    kernels.require_devices(backend, groups)
    proxies = [o for o, i in zip(given, inner, strict=True) if o is not i]
    guard = Guard(
        inner,
        model,
        proxies=proxies,
        clip=policy,
        skip_nonfinite=skip_nonfinite,
        max_consecutive_skips=max_consecutive_skips,
        sinks=sinks,
        backend=backend,
    )
    if "guard" not in torch.optim.Optimizer.__dict__:
        torch.optim.Optimizer.guard = _NoGuard()  # type: ignore[attr-defined]
    for o in inner:
        o.guard = guard  # type: ignore[attr-defined]
    for proxy in proxies:
        if getattr(proxy, "guard", None) is not guard:  # most find it in what they wrap, and can be pickled then
            proxy.guard = guard
    return optimizer
