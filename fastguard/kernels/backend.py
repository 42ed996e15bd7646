"""What a backend is: a way to compute the figures, on the devices that it serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ..errors import BackendUnavailableError

Row = tuple[float, ...]
Limits = tuple[float, float, float]


class Backend:
    """A subclass with a `name`, entered in `registry.BACKENDS`, is all that a backend takes.

    `reference` defines what every figure means; the others give the same, faster. An operation that a backend leaves
    out is done by another one where "auto" chooses, and raises where this one was asked for by name.

    A constructor must not fail where the backend cannot run: `unavailable` says why.
    """

    name: str

    def unavailable(self) -> str | None:
        """Why this backend cannot run here, in one line; None if it can."""
        return None

    def detail(self) -> str:
        """What `fastguard info` says of it; asked only where it can run."""
        return type(self).__doc__ or ""

    def accepts(self, device: torch.device) -> bool:
        """Whether it reads tensors on `device`."""
        return device.type == "cpu"

    def problem_on(self, device: torch.device, operation: str) -> str | None:
        """What speaks against `operation` on this very device, as a trial that failed; only "auto" asks."""
        return None

    def has(self, operation: str) -> bool:
        """Whether the method of that name is its own."""
        return getattr(type(self), operation) is not getattr(Backend, operation)

    def tensor_stats(self, tensors: Sequence[Any], unscale: float = 1.0) -> tuple[bytearray, Row | None]:
        """Rows of `tensors` times `unscale`, as float64 in bytes in the order of `fastguard.records.COLUMNS`, and their
        fold; None for the fold leaves it to others.

        Args:
            tensors: whatever users pass, all on one device that it accepts. `tensors.plain` makes strided tensors of
                sparse, lazy and distributed ones, or raises the error for the user.

        Raises:
            UnsupportedTensorError: with the index of a tensor that cannot be read.
        """
        self._lacks("tensor_stats")

    def scale_(self, tensors: Sequence[Any], factor: float) -> None:
        """x *= factor in place, with one rounding, or UnsupportedTensorError: none is written to unless all can be."""
        self._lacks("scale_")

    def activation(self, x: torch.Tensor, dim: int | None, limits: Limits) -> tuple[Row, bytes | None]:
        """One row of ACTIVATION_COLUMNS of a real tensor and, with a `dim` counted from the front, CHANNEL_COLUMNS of
        each of its indices as float64 [C, 4] in bytes. `limits`: low, high, near-zero threshold, which is above 0."""
        self._lacks("activation")

    def activation_into(
        self, x: torch.Tensor, dim: int | None, limits: Limits, row: torch.Tensor, table: torch.Tensor | None
    ) -> None:
        """The same into `row`, float64 [10], and `table`, float64 [C, 4], on the device of `x`, in the order of its
        current stream, for an `x` that has been through `tensors.plain`. Does not synchronise."""
        self._lacks("activation_into")

    def _lacks(self, operation: str) -> NoReturn:
        raise BackendUnavailableError(
            f"`backend` {self.name!r} has no {operation}. "
            'Leave it "auto", which takes the best backend that has, or ask for "reference".'
        )
