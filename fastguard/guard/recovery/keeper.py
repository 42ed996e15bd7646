"""What is kept of a run and put back, and whether it is worth keeping."""

from __future__ import annotations

import copy

import torch

from ..ledger import Ledger
from ..run import Run
from ..sampling import Sampling
from .extents import are_finite, have_not_grown, largest
from .ladder import Ladder
from .settings import Recovery
from .snapshots import Snapshot, Snapshots, parameters_of

WHAT = "recovery"
_GROWN = "parameters have grown"


class Keeper:
    """Takes the snapshots of one guard.

    Attributes:
        snapshots: all of them.
        due: the step after which the next one is to be taken.
        has_grown: whether parameters are many times what they were, as this process alone has found it.
    """

    def __init__(self, settings: Recovery, run: Run, ledger: Ledger, sampling: Sampling, ladder: Ladder) -> None:
        self._settings, self._run, self._ledger, self._sampling = settings, run, ledger, sampling
        self._ladder = ladder
        self.snapshots = Snapshots(settings.keep, settings.quarantine or 0, settings.patience)
        self.due = 0
        self.has_grown = False
        self._flags: list[tuple[int, torch.Tensor, str]] = []  # whether all is well, and what is not else

    def take(self, step: int, *, is_proved: bool = False) -> None:
        """A snapshot, ahead of `step`."""
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
        """Copies what is there now."""
        run = self._run
        buffers = [] if run.buffers is None else run.buffers.places
        snapshot.take(run.optimizers(), buffers, self._settings.state, with_random_state=self._settings.replay)
        clip_state = None if run.clip is None else copy.deepcopy(run.clip.state_dict())
        snapshot.baseline = {"ladder": self._ladder.baseline(), "clip": clip_state}
        snapshot.loss = self._ladder.loss

    def restore(self, snapshot: Snapshot) -> None:
        """Puts it back; of steps before, nothing is waited for any longer."""
        run = self._run
        snapshot.restore()
        if run.clip is not None and snapshot.baseline["clip"] is not None:
            run.clip.load_state_dict(copy.deepcopy(snapshot.baseline["clip"]))
        if run.buffers is not None:
            run.buffers.refresh()
        self._sampling.forget()
        self._ledger.skips.due = None
        self._flags.clear()
        self.has_grown = False

    def forget(self) -> None:
        """The run goes on from elsewhere."""
        self.snapshots.forget()
        self._flags.clear()
        self.has_grown = False

    def cause(self, step: int) -> str:
        """What was found in the meantime of what was kept: why to go back; "" for no reason."""
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
        """Whether parameters are, now."""
        return are_finite(self._parameters())

    def look_for_growth(self, step: int) -> None:
        """The loss has just risen: whether parameters have grown since the newest snapshot that counts."""
        before = self.snapshots.proved
        if before is not None and before.largest is not None:
            flag = have_not_grown(largest(self._parameters()), before.largest)
            if flag is not None:
                self._flags.append((step, flag, _GROWN))

    def _parameters(self) -> list[torch.Tensor]:
        return parameters_of(self._run.optimizers())
