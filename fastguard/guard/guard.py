"""Guard: the conductor. Has every step judged, and hands the records on."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .. import kernels
from ..activations import ActivationMonitor, Replay
from ..errors import NotGuardedError
from ..history import TrainingHistory
from ..names import Namer
from ..report import Report, build_report
from ..stats import StepStats
from ..tools.clipping import ClipPolicy
from ..weights import WeightCollector, WeightSampler
from .checkup import Checkup
from .facts import ModelFacts
from .hooks import Attachment
from .judges import ElsewhereError, Judges
from .ledger import Ledger
from .scaler import Handed
from .sharding import refuse_shards
from .undo import Undo
from .watching import Watch
from .wrappers import inwards

_HOW_TO_GUARD = (
    "Guard it with `optimizer = fastguard.wrap(optimizer, model)`; "
    "a pickled or deep-copied optimizer has lost its guard."
)


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
        activations: ActivationMonitor | None = None,
        weights: dict[str, Any] | None = None,
        check_every: int | None = None,
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
        self._attachments = [
            Attachment(
                self,
                optimizer,
                self._proxies,
                None if weights is None else WeightCollector(WeightSampler(**{"backend": backend, **weights})),
            )
            for optimizer in optimizers
        ]
        self.judges = Judges(self._ledger, self.backend, when_behind, clip_through)
        self._watch = Watch(activations, model, self.recorder)
        self._facts = ModelFacts(model, optimizers, self._namer, self.backend)
        self.history.note_model(**self._facts.at_first())
        self._checkup = Checkup(self.recorder.history, self._note_facts, check_every)
        self._ledger.checkup = self._checkup
        self._ledger.steps_to_checkup = self._checkup.interval
        self._note_facts()
        self.has_more_to_do = True  # after a step; a call saved in each one counts
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
        self._watch.catch_up()
        self.judges.flush()

    @property
    def activations(self) -> ActivationMonitor | None:
        """The monitor of activations, if they are watched."""
        return self._watch.monitor

    def replay(self, forward: Callable[[], Any]) -> Replay:
        """Runs `forward` once more with every module watched, and says where NaN or Inf came up.

        Meant for after a skipped step, whose parameters are as they were: `guard.replay(lambda: model(x))`. What it saw
        goes on the record of that step. See `fastguard.activations.replay`; it leaves the training as it was.

        Raises:
            ValueError: the guard has no model; `forward` did not call it.

        Cost: a forward pass, one read of each output, and a copy of the buffers; on a GPU, waits for the device.
        """
        self.judges.now.catch_up()
        return self._watch.replay(forward)

    def report(self) -> Report:
        """What the run looks like so far, the step just taken included: status, findings, recommendations, numbers.

        Cost: about 1 ms. On a GPU, waits for the device.
        """
        self._watch.catch_up()
        self.judges.now.catch_up()
        self._note_facts()
        lost = self.recorder.lost()
        if self.judges.now.num_dropped:
            lost["the guard, which was behind (when_behind='drop')"] = self.judges.now.num_dropped
        return build_report(self.recorder.history_with_last(), sinks_lost=lost)

    def detach(self) -> None:
        """Leaves the optimizer as it was before `wrap`. Records stay readable; sinks stay open."""
        self.flush()
        self._watch.close()
        self._facts.close()
        for attachment in self._attachments:
            attachment.remove()
            optimizer = attachment._optimizer()
            if optimizer is not None:
                optimizer.__dict__.pop("guard", None)
        for proxy in (ref() for ref in self._proxies):
            if proxy is not None:
                proxy.__dict__.pop("guard", None)
        self._attachments = []

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For steps that are no part of the run, as those of a learning-rate test: not judged, clipped or recorded.

        >>> import torch, fastguard
        >>> p = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = fastguard.wrap(torch.optim.SGD([p], lr=0.1))
        >>> with optimizer.guard.paused():
        ...     optimizer.step()
        >>> optimizer.guard.last is None
        True
        """
        attachments = list(self._attachments)
        before = [attachment.is_paused for attachment in attachments]
        for attachment in attachments:
            attachment.is_paused = True
        try:
            with self._watch.paused():
                yield
        finally:
            for attachment, was in zip(attachments, before, strict=True):
                attachment.is_paused = was

    def close(self) -> None:
        """Hands over what is held back and closes the sinks. Call it at the end of training."""
        self._note_facts()
        self.flush()
        self._watch.close()
        self.recorder.close()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: step number, run of skips, history, clip policy. Plain data, fit for torch.save.

        The step just taken is in it; `observe` may still add to that step, for this run only. On a GPU, waits for it.
        """
        self._watch.catch_up()
        self.judges.now.catch_up()
        return {
            "version": 1,
            **self._ledger.state_dict(),
            "checkup": self._checkup.state_dict(),
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
        if "checkup" in state:
            self._checkup.load_state_dict(state["checkup"])
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

    def step_of(self, caller: Attachment) -> int:
        """Number of the step that `caller` is about to take."""
        decision = self.judges.now._decision
        follows = decision is not None and id(caller) not in decision.taken
        return self._ledger.step - follows

    def names_of(self, caller: Attachment) -> tuple[str, ...]:
        """Names of the parameters of one optimizer, as they were at the step just judged."""
        start = 0
        for attachment in self._attachments:
            count = sum(len(group["params"]) for group in attachment.optimizer.param_groups)
            if attachment is caller:
                return self._names[start : start + count]
            start += count
        raise ValueError("`caller` must be one of this guard's attachments")

    def step_taken(self) -> None:
        """The step just judged is over."""
        is_counting = self._facts.step_taken()
        if self._watch.monitor is not None:
            self.judges.now.add_overhead(self._watch.end_step(self._ledger.step - 1))
        else:
            self.has_more_to_do = is_counting

    def _note_facts(self) -> None:
        """Tells the rules what is so now of model and optimizers."""
        optimizers = [o for o in (attachment._optimizer() for attachment in self._attachments) if o is not None]
        if optimizers:
            self.recorder.history.note_model(**self._facts.now(optimizers))

    def names(
        self, fingerprint: int, optimizers: Sequence[torch.optim.Optimizer], groups: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[str, ...]:
        """Names of all parameters; asked for again when the fingerprint says that these are other ones."""
        if fingerprint != self._fingerprint:
            refuse_shards(groups)
            self._names = self._namer.names(optimizers)
            self._fingerprint = fingerprint
        return self._names
