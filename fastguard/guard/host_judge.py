"""The judge of gradients in the host's memory, or in any that may be waited for: it decides in Python."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from .. import kernels
from ..stats import StepStats, TensorStats, norm_of
from .ledger import Ledger
from .recorder import loss_of
from .scaler import UNSCALED, Handed, Scaling
from .undo import SetAside, Undo

if TYPE_CHECKING:
    from .guard import Guard
    from .hooks import Attachment


class _Decision:
    """What was decided for one step; shared by all optimizers under one guard until each has taken its step."""

    def __init__(self, record: StepStats, scale: float | None) -> None:
        self.record = record
        self.scale = scale
        self.taken: set[int] = set()


class HostJudge:
    """Judges a step at once: when the step is taken, its record is there.

    Cost a step: one read of the gradients, and one more read and write if they are clipped; on an accelerator, syncs.
    """

    def __init__(self, ledger: Ledger, backend: str) -> None:
        self._ledger = ledger
        self._backend = backend
        self._decision: _Decision | None = None
        self.observe = ledger.recorder.observe
        self.add_overhead = ledger.recorder.add_overhead
        self.flush = ledger.recorder.flush

    lag = 0
    num_dropped = 0

    def catch_up(self) -> None:
        """Enters what is still on its way: nothing is."""

    def judge(
        self, guard: Guard, caller: Attachment, optimizer: torch.optim.Optimizer, handed: Handed, first: bool, loss: Any
    ) -> Undo | None:
        """Judges the gradients of all optimizers when the first of them steps; the others follow the decision."""
        scaling = handed.read() if handed.from_scaler else UNSCALED
        if len(guard._attachments) == 1:
            record = self._decide(guard, caller, scaling, first, loss)
        else:
            record = self._decide_together(guard, caller, scaling, first, loss)
        if (record.skipped and caller.can_skip) or scaling.found_inf:
            return SetAside(optimizer)
        factor = record.clip_coef if scaling.fused else record.clip_coef * scaling.inverse
        if factor != 1.0:
            gradients, _, _ = kernels.collect_gradients([group["params"] for group in optimizer.param_groups])
            if gradients:
                kernels.run_scale(gradients, factor, self._backend)
        return None

    def _decide_together(self, guard: Guard, caller: Attachment, scaling: Scaling, first: bool, loss: Any) -> StepStats:
        decision = self._decision
        if decision is None or not first or id(caller) in decision.taken:
            record = self._decide(guard, caller, scaling, first, loss)
            decision = self._decision = _Decision(record, scaling.scale)
        elif decision.scale != scaling.scale:
            raise RuntimeError(
                "optimizers under one guard must have their gradients scaled alike when they step: got scale "
                f"{scaling.scale} after {decision.scale}. Call scaler.unscale_ on all of them, or on none, before."
            )
        decision.taken.add(id(caller))
        if len(decision.taken) == len(guard._attachments):
            self._decision = None
        return decision.record

    def _decide(self, guard: Guard, caller: Attachment, scaling: Scaling, first: bool, loss: Any) -> StepStats:
        ledger = self._ledger
        if first:
            ledger.recorder.flush()  # before the new table is there: two of them at a time are enough
        optimizers = [a.optimizer for a in guard._attachments]
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        table, total, positions, fingerprint = kernels.gradient_stats(groups, self._backend, scaling.inverse)
        names = guard.names(fingerprint, optimizers, groups)
        tensors = TensorStats(table, names if positions is None else lambda: [names[i] for i in positions], total)
        norm = tensors.total_norm() if total is None else norm_of(total[1], total[6], total[7])
        finite = math.isfinite(norm)
        coefficient = guard.clip.coefficient(norm) if guard.clip is not None and finite else 1.0
        skipped = ((guard.skip_nonfinite and not finite) or scaling.found_inf) and caller.can_skip
        record = StepStats(
            step=ledger.step if first else ledger.step - 1,
            tensors=tensors,
            clip_coef=1.0 if skipped else coefficient,
            skipped=skipped,
            loss=None if loss is None else loss_of(loss),
            lr=learning_rate(optimizers[0]),
            loss_scale=scaling.scale,
        )
        ledger.step = record.step + 1
        ledger.enter(record, finite, first, scaling.from_scaler)
        if ledger.due is not None:
            ledger.raise_due()
        return record


def learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """That of the first group; synchronises if it is a tensor on an accelerator."""
    lr = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    return None if lr is None else float(lr)
