"""Takes and restores the snapshots of one guard, and checks whether they are worth restoring."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from .extents import are_finite, have_not_grown, largest
from .ladder import Ladder
from .settings import Recovery
from .snapshots import Snapshot, Snapshots, parameters_of

WHAT = "recovery"
_GROWN = "parameters have grown"


class Keeper:
    """Takes and restores the snapshots of one guard.

    Args:
        run: of the guard; see `fastguard.step.run.Run`.
        forget: called after a restore, to drop what is pending from the state before.

    Attributes:
        snapshots: all of them.
        due: the step after which to take the next.
        has_grown: whether parameters have grown many times larger, as found by this process alone.
    """

    def __init__(self, settings: Recovery, run: Any, ladder: Ladder, forget: Callable[[], None]) -> None:
        self._settings, self._run, self._ladder, self._forget = settings, run, ladder, forget
        self.snapshots = Snapshots(settings.keep, settings.quarantine or 0, settings.patience)
        self.due = 0
        self.has_grown = False
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
        self.has_grown = False

    def forget(self) -> None:
        """Drops all snapshots, because the run continues from another state."""
        self.snapshots.forget()
        self._flags.clear()
        self.has_grown = False

    def cause(self, step: int) -> str:
        """Why to roll back, as found in earlier snapshots; "" for no reason."""
        late, found = self._settings.quarantine or 0, ""
        for flag in [flag for flag in self._flags if flag[1].is_cpu or step >= flag[0] + late]:
            self._flags.remove(flag)
            if flag[1]:
                continue
            if flag[2] == _GROWN:
                self.has_grown = True
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
                self._flags.append((step, flag, _GROWN))

    def _parameters(self) -> list[torch.Tensor]:
        return parameters_of(self._run.optimizers())
