"""The record of a step, and the statistics of a list of tensors. Plain data: this module imports neither torch nor
numpy, so that logs can be read on a machine without them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from .._text import listed, shown
from . import columns
from .columns import COLUMNS, INDEX, ROW_BYTES, TensorRow
from .samples import BatchSample, ModuleActivity, WeightStats

_Names: TypeAlias = Sequence[str] | Callable[[], Sequence[str]] | None  # of tensors, perhaps asked for later


@dataclass(frozen=True, slots=True)
class GradientStats:
    """Statistics of a list of tensors, as if they were one vector.

    `norm` is NaN if any element is NaN, else Inf if any is infinite. Other figures are over the finite elements:
    `max_val` is the largest |g|, `min_val` the smallest |g| that is not zero (0.0 if there is none), `std` the
    population's standard deviation.
    """

    norm: float
    max_val: float
    min_val: float
    mean: float
    std: float
    num_zeros: int
    num_nans: int
    num_infs: int
    total_elements: int

    @classmethod
    def from_row(cls, row: Sequence[float]) -> GradientStats:
        """The statistics of a row in the order of `COLUMNS`."""
        r = columns.as_row(row)
        mean, std = r.mean_and_std()
        return cls(r.norm, r.abs_max, r.abs_min_nonzero, mean, std, r.num_zeros, r.num_nans, r.num_infs, r.numel)

    @classmethod
    def from_gradients(cls, gradients: Sequence[Any]) -> GradientStats:
        """Statistics of `gradients`: torch tensors or NumPy arrays, of any floating dtype, shape and layout.

        Equivalent to: `tensor_stats(gradients).total()`.

        Raises:
            UnsupportedTensorError: an array is not floating point.

        Cost: reads every element once; synchronises if a tensor is on an accelerator.

        >>> import fastguard, torch
        >>> fastguard.GradientStats.from_gradients([torch.tensor([3.0, 4.0]), torch.zeros(2)]).norm
        5.0
        """
        from ..kernels import as_list, as_tensor, tensor_stats

        return tensor_stats([as_tensor(g) for g in as_list(gradients, "gradients")]).total()

    def is_healthy(self) -> tuple[bool, list[str]]:
        """Whether the gradients look healthy, and a message for each problem.

        The toolkit's thresholds: NaN, Inf, a norm above 1000 (exploding), a norm below 1e-8 (vanishing).

        >>> GradientStats(5.0, 4.0, 3.0, 3.5, 0.5, 0, 0, 0, 2).is_healthy()
        (True, [])
        """
        norm, of_all = self.norm, f"of {self.total_elements} elements"
        checks = (
            (self.num_nans, f"NaN gradients: {self.num_nans} {of_all}"),
            (self.num_infs, f"Inf gradients: {self.num_infs} {of_all}"),
            (norm > 1000 and not self.num_infs, f"Exploding gradients: norm {norm:.3g} is above 1000"),
            (norm < 1e-8 and self.total_elements, f"Vanishing gradients: norm {norm:.3g} is below 1e-8"),
        )
        issues = [issue for is_so, issue in checks if is_so]
        return not issues, issues


class TensorStats:
    """A table of statistics, one row a tensor, in the order of the list of tensors.

    `table` is a read-only float64 `memoryview` of shape [T, C] with the columns of `COLUMNS` ([0] if there are no
    tensors: a memoryview has no empty rows); `numpy.asarray(table)` and `torch.frombuffer` read it without a copy.
    `stats[3]` and `stats["layer.weight"]` are `TensorRow`s, and every column is an attribute: `stats.num_nans` is a
    tuple with a number for each tensor.

    >>> import fastguard, torch
    >>> stats = fastguard.tensor_stats([torch.tensor([3.0, 4.0]), torch.zeros(2)], names=["a", "b"])
    >>> stats["a"].norm, stats.num_zeros, stats.total().norm
    (5.0, (0, 2), 5.0)
    """

    __slots__ = ("_all_zero", "_data", "_names", "_total")

    def __init__(self, data: bytes | bytearray, names: _Names = None, total: Sequence[float] | None = None) -> None:
        if len(data) % ROW_BYTES:
            raise ValueError(f"`data` must be whole rows of {ROW_BYTES} bytes, got {len(data)} bytes")
        self._data = data
        self._names = names
        self._total = total
        self._all_zero: list[int] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors; `tensor0`, `tensor1`, … by default."""
        if not isinstance(self._names, tuple):
            names = self._names() if callable(self._names) else self._names
            self._names = tuple(f"tensor{i}" for i in range(len(self))) if names is None else tuple(names)
        return self._names

    @property
    def table(self) -> memoryview[float]:
        """The table itself: float64, read-only, shape [T, C], or [0] if there are no tensors."""
        flat = memoryview(self._data).toreadonly()
        if not self._data:
            return flat.cast("B").cast("d")
        return flat.cast("d", shape=[len(self), len(COLUMNS)])

    def __len__(self) -> int:
        return len(self._data) // ROW_BYTES

    def __getitem__(self, key: int | str) -> TensorRow:
        if isinstance(key, str):
            try:
                index = self.names.index(key)
            except ValueError:
                raise KeyError(f"no tensor is named '{shown(key)}'; the names are: {listed(self.names, 8)}") from None
        else:
            index = range(len(self))[key]
        return columns.as_row(columns.ROW.unpack_from(self._data, index * ROW_BYTES))

    def __iter__(self) -> Iterator[TensorRow]:
        return map(columns.as_row, columns.ROW.iter_unpack(self._data))

    def column(self, name: str) -> memoryview[float]:
        """One column of the table as a read-only view: float64 (also for counts), shape [T]. Copies nothing."""
        return memoryview(self._data).toreadonly().cast("d")[INDEX[name] :: len(COLUMNS)]

    def __getattr__(self, name: str) -> tuple[Any, ...]:
        if name not in INDEX:
            raise AttributeError(f"'TensorStats' has no attribute {name!r}; its columns are {', '.join(COLUMNS)}")
        values = self.column(name).tolist()
        return tuple(map(int, values)) if columns.TABLE[INDEX[name]].is_count else tuple(values)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *COLUMNS]

    norm = property(lambda self: tuple(row.norm for row in self), doc="2-norm of each tensor, as torch has it.")

    @property
    def nonfinite(self) -> list[int]:
        """Indices of the tensors that contain NaN or Inf, or whose norm overflowed."""
        known = zip(*(self.column(name).tolist() for name in ("num_nans", "num_infs", "finite_norm")))
        return [i for i, (nans, infs, norm) in enumerate(known) if nans or infs or not math.isfinite(norm)]

    def total_row(self) -> tuple[float, ...]:
        """The fold of all rows, first to last, in the order of `COLUMNS`."""
        if self._total is None:
            self._total = columns.fold_rows(self)
        return self._total if type(self._total) is tuple else tuple(self._total)

    def total_norm(self) -> float:
        """2-norm of all tensors together, as torch has it; quicker than `total().norm`."""
        return columns.norm_of(*columns.norm_parts(self.total_row()))

    def total(self) -> GradientStats:
        """All tensors together as one vector."""
        return GradientStats.from_row(self.total_row())

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Rows by name, each as a dict by column."""
        return {name: row._asdict() for name, row in zip(self.names, self, strict=True)}

    def __repr__(self) -> str:
        return f"TensorStats({len(self)} tensors, norm={self.total().norm:.6g})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorStats):
            return NotImplemented
        return self._data == other._data and self.names == other.names

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorStats, (bytes(self._data), self.names, self._total), (None, {"_all_zero": self._all_zero})


def all_zero(tensors: TensorStats) -> list[int]:
    """Indices of the tensors whose elements are all zero; empty tensors do not count."""
    if tensors._all_zero is None:
        has_zeros = tensors._data and tensors.total_row()[INDEX["num_zeros"]]
        known = zip(tensors.column("num_zeros"), tensors.column("numel")) if has_zeros else ()
        tensors._all_zero = [i for i, (zeros, numel) in enumerate(known) if zeros == numel > 0]
    return tensors._all_zero


def without_rows(tensors: TensorStats) -> TensorStats:
    """A table without rows that keeps the names, the total and `all_zero` of `tensors`."""
    names = tensors.names if tensors._names is None else tensors._names
    left = TensorStats(b"", names, tensors.total_row())
    left._all_zero = all_zero(tensors)
    return left


class ClippedGroup(NamedTuple):
    """One group of parameters that a clip policy clips separately: its norm before and after, and the policy's trigger.

    The trigger is Inf if there is none.
    """

    name: str
    norm: float
    clipped_norm: float
    trigger: float


@dataclass(frozen=True, slots=True)
class StepStats:
    """One optimizer step, as the guard saw it. All figures are of the unscaled gradients, before clipping.

    Attributes:
        step: number of the step, from 0; a skipped step has a number too.
        tensors: one row for each parameter that had a gradient.
        clip_coef: the factor that the gradients were multiplied by; 1.0 if they were not clipped. If groups, tensors or
            elements are clipped separately, the ratio of the total norms after and before.
        skipped: whether the optimizer left parameters and state unchanged.
        loss, val_loss: as passed to `Guard.observe`, or returned by a closure; None if not known.
        lr: learning rate of the first parameter group.
        loss_scale: the GradScaler's scale that the gradients still had when `step` was called, else None.
        activations, weights: modules and parameters that were sampled at this step; usually empty.
        batches: forward passes of the whole model that were sampled since the last record; usually empty.
        grad_cosine: cosine between this step's gradient and that of the step before, on a strided sample of at most
            4096 elements; computed at the first twenty steps, then at one in fifty, else None.
        trigger: the norm of all gradients above which the clip policy acts (for `Value`, the absolute value of an
            element); None if there is none.
        over: names of the groups or tensors above their triggers, if they are clipped separately.
        groups: the groups, if they are clipped separately.
    """

    step: int
    tensors: TensorStats
    clip_coef: float = 1.0
    skipped: bool = False
    loss: float | None = None
    val_loss: float | None = None
    lr: float | None = None
    loss_scale: float | None = None
    activations: tuple[ModuleActivity, ...] = ()
    weights: tuple[WeightStats, ...] = ()
    batches: tuple[BatchSample, ...] = ()
    grad_cosine: float | None = None
    trigger: float | None = None
    over: tuple[str, ...] = ()
    groups: tuple[ClippedGroup, ...] = ()

    @property
    def gradients(self) -> GradientStats:
        """All gradients together as one vector."""
        return self.tensors.total()

    @property
    def norm(self) -> float:
        """Total 2-norm before clipping; NaN or Inf if any element is."""
        return self.tensors.total_norm()

    @property
    def clipped_norm(self) -> float:
        """Total 2-norm after clipping."""
        return self.norm * self.clip_coef

    @property
    def is_skipped_by_policy(self) -> bool:
        """Whether the clip policy skipped the step although its gradients were finite."""
        is_over = bool(self.over) or (self.trigger is not None and self.norm > self.trigger)
        return self.skipped and is_over and self.is_finite

    @property
    def clipped(self) -> bool:
        """Whether the gradients were scaled down."""
        return self.clip_coef != 1.0

    @property
    def is_finite(self) -> bool:
        """Whether every gradient is finite, and so is the total norm."""
        return math.isfinite(self.norm)

    @property
    def nonfinite(self) -> list[str]:
        """Names of the tensors with NaN or Inf, in backward order: the first is the likeliest origin.

        Backward order is the reverse of the order of the model's parameters: in the backward pass, a bad value reaches
        the tensors after it in this list, and none before it.
        """
        if self.is_finite:
            return []
        names = self.tensors.names
        return [names[i] for i in reversed(self.tensors.nonfinite)]
