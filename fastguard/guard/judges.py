"""Which judge a run gets: the host's, which may wait for the gradients, or the one that never waits for a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .. import kernels
from .device_judge import DeviceJudge
from .engines import ElsewhereError, Engine, ReferenceEngine, TritonEngine
from .host_judge import HostJudge
from .ledger import Ledger
from .ring import WHEN_BEHIND

if TYPE_CHECKING:
    from .hooks import Attachment

__all__ = ["ElsewhereError", "Judges", "check_settings", "engine_for"]

CLIP_THROUGH = ("scale", "grad_scale")
_GPUS = ("cuda", "xpu", "mps")


def check_settings(when_behind: str, clip_through: str) -> None:
    """Raises ValueError for a setting that is not known."""
    for name, value, known in (("when_behind", when_behind, WHEN_BEHIND), ("clip_through", clip_through, CLIP_THROUGH)):
        if value not in known:
            raise ValueError(f"`{name}` must be one of {list(known)}, got {value!r}")


def engine_for(device: torch.device, backend: str) -> type[Engine] | None:
    """What measures on `device` without waiting for it; None where the host may as well compute by itself.

    Args:
        backend: "auto" or a name, from `kernels.resolve_backend`. On the CPU only "triton" has an engine: interpreted.
    """
    if device.type == "cpu":
        return TritonEngine if backend == "triton" else None
    if device.type not in _GPUS or backend == "cpu":
        return None
    return TritonEngine if kernels.takes_triton(device, backend) else ReferenceEngine


class Judges:
    """The judge of one guard, chosen by where its gradients are. Knows neither the guard nor the optimizers.

    Attributes:
        now: the judge.
        on_cpu: where the first parameter was when it was chosen; None before.
    """

    def __init__(self, ledger: Ledger, backend: str, when_behind: str, clip_through: str) -> None:
        self._ledger = ledger
        self._settings = (backend, when_behind, clip_through)
        self.now: HostJudge | DeviceJudge = HostJudge(ledger, backend)
        self.on_cpu: bool | None = None

    def choose(self, attachments: Sequence[Attachment], *, anywhere: bool = False) -> None:
        """Takes the judge for the parameters as they are now; what the one before still had is delivered.

        Args:
            anywhere: the host's judge, which reads tensors wherever they are.
        """
        params = [p for a in attachments for group in a.optimizer.param_groups for p in group["params"]]
        backend, when_behind, clip_through = self._settings
        self.on_cpu = params[0].is_cpu if params else None
        # A step that evaluates its closure several times and cannot be skipped waits for its losses anyway.
        host = anywhere or not params or not all(a.can_skip for a in attachments)
        wanted = not host and all(engine_for(d, backend) is not None for d in {p.device for p in params})
        if wanted is not isinstance(self.now, DeviceJudge):
            self.now.flush()
            self.now = (
                DeviceJudge(self._ledger, lambda device: engine_for(device, backend), when_behind, clip_through)
                if wanted
                else HostJudge(self._ledger, backend)
            )

    def flush(self) -> None:
        """Delivers everything. Waits for the device."""
        self.now.flush()
