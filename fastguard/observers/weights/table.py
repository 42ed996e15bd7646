"""The table that people print by hand: norms of each gradient and parameter, their ratio, zeros, NaN and Inf."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ... import kernels
from ..._text import NAME_WIDTH, in_columns, listed, shown
from ...names import named_parameters
from ...records import TensorStats


class GradientLine(NamedTuple):
    """One parameter.

    Attributes:
        name: the parameter's name, without the prefixes of wrappers.
        shape: its shape.
        grad_norm: 2-norm of its gradient; None if it has none.
        weight_norm: 2-norm of the parameter.
        num_zeros, num_nans, num_infs: elements of the gradient.
        num_elements: size of the gradient, 0 if it has none; real and imaginary parts count apart.
    """

    name: str
    shape: tuple[int, ...]
    grad_norm: float | None
    weight_norm: float
    num_zeros: int
    num_nans: int
    num_infs: int
    num_elements: int

    @property
    def ratio(self) -> float | None:
        """Gradient norm over weight norm; None without a gradient or with weights that are all zero."""
        return None if self.grad_norm is None or not self.weight_norm else self.grad_norm / self.weight_norm

    @property
    def zero_ratio(self) -> float:
        """Share of the gradient's elements that are exactly zero; 0.0 of nothing."""
        return self.num_zeros / self.num_elements if self.num_elements else 0.0


_HEADINGS = ("parameter", "shape", "grad norm", "weight norm", "ratio", "zeros", "NaN", "Inf")


class GradientTable:
    """Lines of `check_gradients`, in the model's order: iterate, index by position or by name, or print it."""

    def __init__(self, lines: Iterable[GradientLine]) -> None:
        self._lines = list(lines)

    def __iter__(self) -> Iterator[GradientLine]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, key: int | str) -> GradientLine:
        if isinstance(key, int):
            return self._lines[key]
        for line in self._lines:
            if line.name == key:
                return line
        names = listed((line.name for line in self._lines), 8)
        raise KeyError(f"no parameter is named '{shown(key)}'; the names are: {names}")

    @property
    def norm(self) -> float:
        """2-norm of all gradients together, as torch has it: NaN if any is, else Inf if any is."""
        norms = [line.grad_norm for line in self._lines if line.grad_norm is not None]
        return math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Lines by name, each a dict by column."""
        return {line.name: {**line._asdict(), "ratio": line.ratio} for line in self._lines}

    def __str__(self) -> str:
        rows = [_HEADINGS, *map(_cells, self._lines)]
        text = in_columns(rows, left=(0, 1))
        text.insert(1, "-" * len(text[0]))
        missing = sum(line.grad_norm is None for line in self._lines)
        text.append(f"norm of all gradients: {self.norm:.4g}" + (f"; {missing} without a gradient" if missing else ""))
        return "\n".join(text)

    def __repr__(self) -> str:
        return f"GradientTable({len(self)} parameters, norm={self.norm:.6g})"


def _cells(line: GradientLine) -> tuple[str, ...]:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3e}"

    zeros = f"{line.zero_ratio:.1%}" if line.num_elements else "-"
    shape = "x".join(map(str, line.shape)) or "scalar"
    numbers = (number(line.grad_norm), number(line.weight_norm), number(line.ratio))
    return (shown(line.name, NAME_WIDTH), shape, *numbers, zeros, str(line.num_nans or ""), str(line.num_infs or ""))


def check_gradients(
    model: torch.nn.Module | Iterable[tuple[str, torch.Tensor]], *, backend: str = "auto"
) -> GradientTable:
    """A table of gradients and weights, one line a parameter; `print` it.

    Call it after `backward`, before `step`. Gradients are as they are found: still scaled under a GradScaler, and
    summed over the batches of an accumulation.

    Args:
        model: a module, or named parameters.
        backend: as for `fastguard.tensor_stats`.

    Raises:
        TypeError: neither a module nor named parameters.
        UnsupportedTensorError: a parameter that cannot be read; names it.

    Cost: one read of every parameter and every gradient, in one call; synchronises on an accelerator.

    >>> import torch, fastguard
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> _ = torch.nn.init.constant_(model.weight, 0.5)
    >>> model(torch.tensor([[3.0, 4.0]])).backward()
    >>> print(fastguard.tools.check_gradients(model))
    parameter  shape  grad norm  weight norm      ratio  zeros  NaN  Inf
    --------------------------------------------------------------------
    weight     1x2    5.000e+00    7.071e-01  7.071e+00   0.0%
    norm of all gradients: 5
    """
    named = list(_named(model))
    gradients = [(name, p.grad) for name, p in named if p.grad is not None]
    tensors = [p.detach() for _, p in named] + [g for _, g in gradients]
    names = [name for name, _ in named] + [f"{name}.grad" for name, _ in gradients]
    rows: TensorStats = kernels.tensor_stats(tensors, names=names, backend=backend)
    every = list(rows)
    of_gradient = dict(zip((name for name, _ in gradients), every[len(named) :], strict=True))
    lines = []
    for (name, p), weights in zip(named, every[: len(named)], strict=True):
        g = of_gradient.get(name)
        counts = (0, 0, 0, 0) if g is None else (g.num_zeros, g.num_nans, g.num_infs, g.numel)
        lines.append(GradientLine(name, tuple(p.shape), None if g is None else g.norm, weights.norm, *counts))
    return GradientTable(lines)


def _named(model: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(model, torch.nn.Module):
        return [*named_parameters(model)]
    found: list[tuple[str, torch.Tensor]] = []
    try:
        found += [(name, p) for name, p in model]
    except (TypeError, ValueError):
        found = []
    if not found or not all(isinstance(name, str) and isinstance(p, torch.Tensor) for name, p in found):
        raise TypeError(
            f"`model` must be a torch.nn.Module or its named_parameters(), got {type(model).__name__}. "
            "Pass the model itself."
        )
    return found
