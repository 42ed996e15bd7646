"""Takes and restores the snapshots of one guard, and checks whether they are worth restoring."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .. import kernels
from ..ranks.shards import locals_of
from .ladder import Ladder
from .settings import Recovery
from .snapshots import Snapshot, Snapshots, parameters_of

WHAT = "recovery"
_HAVE_GROWN = "parameters have grown"
_GROWN, _LEAST = 16.0, 1e-2  # times the earlier size; below this size growth is learning


class Keeper:
    """Takes and restores the snapshots of one guard.

    Args:
        run: of the guard; see `fastguard.step.run.Run`.
        forget: called after a restore, to drop what is pending from the state before.

    Attributes:
        snapshots: all of them.
        due: the step after which to take the next.
    """

    def __init__(self, settings: Recovery, run: Any, ladder: Ladder, forget: Callable[[], None]) -> None:
        self._settings, self._run, self._ladder, self._forget = settings, run, ladder, forget
        self.snapshots = Snapshots(settings.keep, settings.quarantine or 0, settings.patience)
        self.due = 0
        self._flags: list[tuple[int, torch.Tensor, str]] = []  # step; whether all is well; the problem if not

    def take(self, step: int, *, is_proved: bool = False) -> None:
        """Takes a snapshot ahead of `step`."""
        self.due = step + self._settings.every
        run = self._run
        with run.failures.kept(WHAT, "No snapshot was taken."):
            snapshot = self.snapshots.take(step, self.fill, is_proved=is_proved)
            buffers = [] if run.buffers is None else run.buffers.places
            written = [place.tensor for place in buffers if place.is_written]
            sizes = snapshot.largest = largest(self._parameters())
            for what, found in (("parameters", sizes), ("buffers", largest(t for t in written if t is not None))):
                if found is not None:
                    self._flags.append((step, found.isfinite().all(), f"{what} are not finite"))

    def fill(self, snapshot: Snapshot) -> None:
        """Copies the present state."""
        run = self._run
        buffers = [] if run.buffers is None else run.buffers.places
        snapshot.take(run.optimizers(), buffers, self._settings.state, with_random_state=self._settings.replay)
        clip_state = None if run.clip is None else copy.deepcopy(run.clip.state_dict())
        snapshot.baseline = {"ladder": self._ladder.baseline(), "clip": clip_state}
        snapshot.loss = self._ladder.level.newest

    def restore(self, snapshot: Snapshot) -> None:
        """Restores it, and drops everything pending from earlier steps."""
        run = self._run
        snapshot.restore()
        if run.clip is not None and snapshot.baseline["clip"] is not None:
            run.clip.load_state_dict(copy.deepcopy(snapshot.baseline["clip"]))
        if run.buffers is not None:
            run.buffers.refresh()
        self._forget()
        self._flags.clear()
        self._ladder.has_grown = False

    def forget(self) -> None:
        """Drops all snapshots, because the run continues from another state."""
        self.snapshots.forget()
        self._flags.clear()
        self._ladder.has_grown = False

    def cause(self, step: int) -> str:
        """Why to roll back, as found in earlier snapshots; "" for no reason."""
        late, found = self._settings.quarantine or 0, ""
        for flag in [flag for flag in self._flags if flag[1].is_cpu or step >= flag[0] + late]:
            self._flags.remove(flag)
            if flag[1]:
                continue
            if flag[2] == _HAVE_GROWN:
                self._ladder.has_grown = True
            else:
                found = flag[2]
        return found

    def are_finite(self) -> bool:
        """Whether the present parameters are finite."""
        return are_finite(self._parameters())

    def look_for_growth(self, step: int) -> None:
        """Compares the sizes of parameters with the newest proved snapshot, once the loss has risen."""
        before = self.snapshots.proved
        if before is not None and before.largest is not None:
            flag = have_not_grown(largest(self._parameters()), before.largest)
            if flag is not None:
                self._flags.append((step, flag, _HAVE_GROWN))

    def _parameters(self) -> list[torch.Tensor]:
        return parameters_of(self._run.optimizers())


def largest(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The largest absolute value of each tensor or local part; NaN or Inf if it holds some; None without tensors.

    Returns float64 [N] on the device of the first tensor. Cost: one read, no sync.
    """
    asked = [*_read_by(tensors)]
    if not asked:
        return None
    if all(t.device.type == "cpu" for t in asked):  # a sixth of what torch takes
        rows = kernels.tensor_stats(asked)
        known = zip(*(rows.column(name).tolist() for name in ("abs_max", "num_nans", "num_infs")))
        sizes = [math.nan if num_nans else math.inf if num_infs else size for size, num_nans, num_infs in known]
        return torch.tensor(sizes, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        found = torch._foreach_norm(asked, math.inf)
        return torch.stack([x.to(asked[0].device, torch.float64) for x in found])


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all elements are. Cost: one read; on an accelerator a sync."""
    sizes = largest(tensors)
    return sizes is None or bool(sizes.isfinite().all())


def have_not_grown(now: torch.Tensor | None, before: torch.Tensor | None) -> torch.Tensor | None:
    """Whether no largest element has grown sixteenfold; None if they do not belong to the same tensors."""
    if now is None or before is None or now.shape != before.shape or now.device != before.device:
        return None
    return (now <= _GROWN * before.clamp(min=_LEAST)).all()


def _read_by(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for t in locals_of(tensors):
        if not (t.is_floating_point() or t.is_complex()) or t.itemsize == 1 or t.layout is not torch.strided:
            continue
        if t.numel() and not t.is_meta:
            yield t.detach()
