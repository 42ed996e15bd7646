"""wrap and Guard: the conductor. Asks the kernels, decides, and hands the record on."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch

from . import kernels
from .amp import Handed
from .aside import Undo
from .clipping import ClipPolicy, GlobalNorm
from .devices import ElsewhereError, Judges, check_settings
from .errors import AlreadyGuardedError, NotGuardedError
from .history import TrainingHistory
from .hooks import Attachment
from .ledger import Ledger
from .naming import Namer
from .proxies import innermost, inwards
from .report import Report, build_report
from .sharding import refuse_sharding_model, refuse_shards
from .stats import StepStats

_Wrapped = TypeVar("_Wrapped")
_HOW_TO_GUARD = (
    "Guard it with `optimizer = fastguard.wrap(optimizer, model)`; "
    "a pickled or deep-copied optimizer has lost its guard."
)


class _NoGuard:
    """What `optimizer.guard` is where none was set: the guard of the optimizer that this one wraps, as accelerate's
    does, or an error that says how to guard it, as for a copy."""

    def __get__(self, optimizer: Any, owner: type) -> Any:
        return self if optimizer is None else Guard.of(optimizer)


class Guard:
    """Watches the gradients of one optimizer, or of several that share one norm. Made by `fastguard.wrap`.

    Attributes:
        history: bounded record of the run, which `report` reads.
        skip_nonfinite: whether steps with NaN or Inf gradients are skipped.
        judges: who judges the steps.
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
        when_behind: str,
        clip_through: str,
    ) -> None:
        self.clip = clip
        self.skip_nonfinite = skip_nonfinite
        self.backend = kernels.resolve_backend(backend)
        self._proxies = [weakref.ref(proxy) for proxy in proxies]  # they own the optimizer, which owns the guard
        self._namer = Namer(model)
        self._namer.check(optimizers)
        self._names: tuple[str, ...] = ()
        self._fingerprint: int | None = None
        self._ledger = Ledger(sinks, max_consecutive_skips)
        self.recorder = self._ledger.recorder
        self._attachments = [Attachment(self, optimizer, self._proxies) for optimizer in optimizers]
        self.judges = Judges(self._ledger, self.backend, when_behind, clip_through)
        # What is held back must reach the sinks also when the guard is dropped or the interpreter ends.
        weakref.finalize(self, self.judges.flush)

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
        """The newest record, or None before the first one. Never blocks.

        On the CPU it is of the step just taken. On a GPU it is the newest that has arrived, and `lag` steps old.
        """
        return self.recorder.last

    @property
    def lag(self) -> int:
        """How many steps were taken since the one that `last` is of: 0 on the CPU, and after `flush`."""
        return self.judges.now.lag

    @property
    def max_consecutive_skips(self) -> int:
        """How many skipped steps in a row raise."""
        return self._ledger.max_consecutive_skips

    @max_consecutive_skips.setter
    def max_consecutive_skips(self, number: int) -> None:
        self._ledger.max_consecutive_skips = number

    def observe(self, loss: Any = None, val_loss: Any = None) -> None:
        """Adds a loss to the step just taken.

        Args:
            loss, val_loss: a float, or a tensor of one element.

        Raises:
            RuntimeError: no step was taken yet, or its record was handed over by `flush`.
            ValueError: a tensor of more than one element.

        Cost: no sync. A tensor on the device of the gradients is copied there: one launch.
        """
        self.judges.now.observe(loss, val_loss)

    def flush(self) -> None:
        """Hands the record of the step just taken to history and sinks. `observe` can no longer add to it.

        Cost: on a GPU, waits for the device.
        """
        self.judges.flush()

    def report(self) -> Report:
        """What the run looks like so far, the step just taken included: status, findings, recommendations, numbers.

        Cost: about 1 ms. On a GPU, waits for the device.
        """
        self.judges.now.catch_up()
        lost = self.recorder.lost()
        if self.judges.now.num_dropped:
            lost["the guard, which was behind (when_behind='drop')"] = self.judges.now.num_dropped
        return build_report(self.recorder.history_with_last(), sinks_lost=lost)

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
        self.flush()
        self.recorder.close()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: step number, run of skips, history, clip policy. Plain data, fit for torch.save.

        The step just taken is in it; `observe` may still add to that step, for this run only. On a GPU, waits for it.
        """
        self.judges.now.catch_up()
        return {
            "version": 1,
            **self._ledger.state_dict(),
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
        self._ledger.load_state_dict(state)
        if self.clip is not None and state["clip"] is not None:
            self.clip.load_state_dict(state["clip"])

    def judge(
        self, caller: Attachment, optimizer: torch.optim.Optimizer, handed: Handed, first: bool, loss: Any
    ) -> Undo | None:
        """Judges the step that `caller` is about to take, clips, and says what has to be undone after it.

        One pass over the gradients of all optimizers, when the first of them steps; the others follow its decision.
        """
        judges = self.judges
        params = optimizer.param_groups[0]["params"] if optimizer.param_groups else None
        if params and params[0].is_cpu is not judges.on_cpu:
            judges.choose(self._attachments)
        try:
            return judges.now.judge(self, caller, optimizer, handed, first, loss)
        except ElsewhereError:  # a gradient where this judge cannot reach: to the one that reaches everywhere
            judges.choose(self._attachments, anywhere=True)
            return judges.now.judge(self, caller, optimizer, handed, first, loss)

    def names(
        self, fingerprint: int, optimizers: Sequence[torch.optim.Optimizer], groups: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[str, ...]:
        """Names of all parameters; asked for again when the fingerprint says that these are other ones."""
        if fingerprint != self._fingerprint:
            refuse_shards(groups)
            self._names = self._namer.names(optimizers)
            self._fingerprint = fingerprint
        return self._names


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
    when_behind: str = "wait",
    clip_through: str = "scale",
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
        when_behind: on a GPU, what happens when records of 16 steps are on their way and none has arrived: "wait" for
            the oldest, or "drop" the newest, which the report then counts.
        clip_through: on a GPU, how the gradients of a fused optimizer are clipped. "scale": a pass of its own, which
            reads and writes them once if they are clipped and does nothing if not. "grad_scale": the optimizer
            divides, and always writes them back once; this wins when more than half of the steps are clipped.

    Raises:
        ValueError: `max_norm` is not > 0; the model has none of the optimizer's parameters; an unknown setting.
        AlreadyGuardedError: the optimizer has a guard.
        BackendUnavailableError: the backend cannot run here.
        NonFiniteGradientsError: from `step`, after `max_consecutive_skips`; parameters are untouched.

    Cost a step: one read of the gradients; one more read and write only if they are clipped. On a GPU two launches, one
    more to clip, and no sync with a fused optimizer; with any other one sync, and none with `skip_nonfinite=False`.

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
    check_settings(when_behind, clip_through)
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
        when_behind=when_behind,
        clip_through=clip_through,
    )
    if "guard" not in torch.optim.Optimizer.__dict__:
        torch.optim.Optimizer.guard = _NoGuard()  # type: ignore[attr-defined]
    for o in inner:
        o.guard = guard  # type: ignore[attr-defined]
    for proxy in proxies:
        if getattr(proxy, "guard", None) is not guard:  # most find it in what they wrap, and can be pickled then
            proxy.guard = guard
    return optimizer
