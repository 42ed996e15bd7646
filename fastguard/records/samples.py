"""Samples of activations, weights and updates. Plain data, without torch."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .codec import Plain, plain_fields, read_fields


class ActivationRow(NamedTuple):
    """A row of raw statistics of one tensor of activations, all float64. `m2` is the sum of squared deviations from the
    mean. `mean`, `m2`, `min` and `max` are those of the finite elements. If there are none, they are 0, 0, Inf and
    -Inf, so that merging needs no special case."""

    numel: float = 0.0
    mean: float = 0.0
    m2: float = 0.0
    min: float = math.inf
    max: float = -math.inf
    num_zeros: float = 0.0
    num_near_zero: float = 0.0
    num_saturated: float = 0.0
    num_nans: float = 0.0
    num_infs: float = 0.0

    @property
    def num_finite(self) -> float:
        return self.numel - self.num_nans - self.num_infs

    @property
    def is_finite(self) -> bool:
        """Whether no element is NaN or Inf."""
        return not self.num_nans and not self.num_infs

    def merged(self, other: ActivationRow) -> ActivationRow:
        """The row of both together; mean and squared deviations as in Chan, Golub and LeVeque (1979)."""
        a, b = self.num_finite, other.num_finite
        weight = b / (a + b) if b else 0.0
        delta = other.mean - self.mean
        mean, m2 = self.mean + delta * weight, self.m2 + other.m2 + delta * delta * a * weight
        least, most = min(self.min, other.min), max(self.max, other.max)
        return ActivationRow._make(map(operator.add, self, other))._replace(mean=mean, m2=m2, min=least, max=most)


ACTIVATION_COLUMNS = ActivationRow._fields
EMPTY_ACTIVATION_ROW = ActivationRow()
# The same for each channel; `sum_abs` is over its finite elements.
CHANNEL_COLUMNS = ("num_near_zero", "num_saturated", "num_nonfinite", "sum_abs")


def merge_activation_rows(rows: Iterable[Sequence[float]]) -> ActivationRow:
    """The row of all elements together, from the rows of parts, merged from first to last."""
    return functools.reduce(ActivationRow.merged, map(ActivationRow._make, rows), EMPTY_ACTIVATION_ROW)


def share_of(part: str, whole: str, doc: str) -> Any:
    return property(lambda self: getattr(self, part) / (getattr(self, whole) or 1), doc=doc)


@dataclass(frozen=True, slots=True)
class ActivationStats:
    """Statistics of one tensor of activations.

    NaN and Inf are counted and excluded from every other figure, but Inf counts as saturated.

    Attributes:
        mean, std: over the finite elements; the population's standard deviation. NaN without finite elements.
        min_val, max_val, abs_max: over the finite elements; NaN without any.
        num_zeros: exact zeros of either sign.
        num_near_zero: finite elements with |x| below the near-zero threshold, including zeros.
        num_saturated: elements outside the range [low, high] of saturation.
        num_nans, num_infs, total_elements: counts.
    """

    mean: float
    std: float
    min_val: float
    max_val: float
    num_zeros: int
    num_saturated: int
    num_nans: int
    num_infs: int
    total_elements: int
    abs_max: float = math.nan
    num_near_zero: int = 0

    @classmethod
    def from_row(cls, row: Sequence[float]) -> ActivationStats:
        """From one row of ACTIVATION_COLUMNS.

        >>> ActivationStats.from_row((4.0, 1.5, 9.0, 0.0, 4.0, 1.0, 1.0, 2.0, 0.0, 0.0)).std
        1.5
        """
        r = ActivationRow._make(row)
        mean = std = low = high = most = math.nan
        if finite := r.num_finite:
            mean, std, low, high, most = r.mean, math.sqrt(r.m2 / finite), r.min, r.max, max(r.max, -r.min)
        zeros, saturated, nans, infs, numel = map(int, (r.num_zeros, r.num_saturated, r.num_nans, r.num_infs, r.numel))
        return cls(mean, std, low, high, zeros, saturated, nans, infs, numel, most, int(r.num_near_zero))

    zero_ratio = share_of("num_zeros", "total_elements", "Share of exact zeros; 0.0 without elements.")
    near_zero_ratio = share_of("num_near_zero", "total_elements", "Share of near-zero elements; 0.0 without elements.")
    saturation_ratio = share_of("num_saturated", "total_elements", "Share of saturated elements; 0.0 without elements.")

    @property
    def is_finite(self) -> bool:
        """Whether no element is NaN or Inf."""
        return not self.num_nans and not self.num_infs


@dataclass(frozen=True, slots=True)
class ModuleActivity(Plain):
    """The output of one module at one sampled step.

    Attributes:
        name: the module's name in the model, without the prefixes of wrappers. "name#2" is its second call within a
            pass, "name[1]" or "name['key']" a further output tensor, "name[hidden]" the hidden layer of a gated MLP,
            the model as a whole has the name of its class.
        family: its kind: "relu", "gelu", "tanh", "sigmoid", "hardtanh", "softmax", "attention", "norm", "linear",
            "block" or "other". Saturation has no meaning for "attention", "norm", "linear" and "block": there only Inf
            counts as saturated. Older logs also have "attention_weights" and "router".
        stats: the output's statistics.
        order: place in the order of execution within its forward pass, from 0.
        inputs_finite: whether all its inputs were finite; None if not checked, as while the output is finite.
        num_units: size of the unit (channel) dimension; 0 if units were not told apart.
        num_dead_units: units that were (near) zero nearly everywhere in all batches of the monitor's window.
        num_saturated_units: the same for saturation.
        dead_units: indices of the first 32 of them.
        num_batches: how many batches the window had when units were judged.
    """

    name: str
    family: str
    stats: ActivationStats
    order: int = 0
    inputs_finite: bool | None = None
    num_units: int = 0
    num_dead_units: int = 0
    num_saturated_units: int = 0
    dead_units: tuple[int, ...] = ()
    num_batches: int = 1

    dead_unit_ratio = share_of("num_dead_units", "num_units", "Share of units that are dead; 0.0 if not told apart.")
    saturated_unit_ratio = share_of("num_saturated_units", "num_units", "The same for saturated units.")

    @property
    def is_origin(self) -> bool:
        """Whether NaN or Inf first appeared in this module: its output is not finite, but its inputs were."""
        return self.inputs_finite is True and not self.stats.is_finite

    def to_dict(self) -> dict[str, Any]:
        """Every field, with those of `stats` at the same level, as plain types; a field that is None has no key."""
        plain = plain_fields(self)
        return {**{name: value for name, value in plain.items() if name != "stats"}, **plain_fields(self.stats)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ModuleActivity:
        """The inverse of `to_dict`, also after JSON; unknown keys are ignored. Raises MisfitError if one is wrong."""
        return cls(**read_fields(cls, plain, stats=ActivationStats(**read_fields(ActivationStats, plain))))


@dataclass(frozen=True, slots=True)
class WeightStats(Plain):
    """One parameter at one sampled step.

    Attributes:
        name: the parameter's name.
        norm: 2-norm of the weights before the step.
        std, abs_max: of the weights, as in `ActivationStats`.
        grad_norm: 2-norm of its gradient before clipping, unscaled; None if it had none.
        update_norm: 2-norm of the step's change, which may be an estimate (see `WeightSampler`); None if not measured,
            as at a skipped step.
        numel, num_nonfinite: number of elements, and of those that are NaN or Inf.
    """

    name: str
    numel: int
    norm: float
    std: float
    abs_max: float
    grad_norm: float | None = None
    update_norm: float | None = None
    num_nonfinite: int = 0

    @property
    def gradient_ratio(self) -> float | None:
        """Gradient norm over weight norm; None without a gradient or with a norm of zero."""
        return None if self.grad_norm is None or not self.norm else self.grad_norm / self.norm

    @property
    def update_ratio(self) -> float | None:
        """Norm of the update over norm of the weights; None if not measured or with a norm of zero."""
        return None if self.update_norm is None or not self.norm else self.update_norm / self.norm


@dataclass(frozen=True, slots=True)
class BatchSample(Plain):
    """One forward pass of the whole model: its first floating-point input, or else its first tensor, and its first
    output, preferably one that is not a scalar.

    All figures describe a strided sample of at most 4096 elements of each, without NaN and Inf. An undefined figure,
    such as the spread of a batch of one, is NaN.

    Attributes:
        training, with_grad: whether the model was in training mode; whether autograd was on.
        num_samples: leading dimension of the first tensor among the inputs.
        input_abs_max, input_mean, input_std: of the input; the population's standard deviation.
        input_num_nonfinite: NaN and Inf among the sampled elements.
        input_is_integer: whether it has integers or booleans: tokens, labels, bytes.
        input_constant_share: share of the features that are the same in all samples.
        input_digest: a hash of the sampled elements in 63 bits. Equal batches have equal digests.
        output_abs_max, output_min, output_max, output_mean, output_std, output_num_nonfinite: of the output.
        output_width: its last dimension; 1 if it has fewer than two.
        output_spread: mean over features of the standard deviation over samples; 0 if all samples get the same output.
        output_is_unit: whether all of it is within [0, 1].
        output_rows_sum_to_one: whether it adds up to 1 along the last dimension, which has more than one element.
    """

    training: bool
    with_grad: bool
    num_samples: int
    input_abs_max: float
    input_mean: float
    input_std: float
    input_num_nonfinite: int
    input_is_integer: bool
    input_constant_share: float
    input_digest: int
    output_abs_max: float
    output_min: float
    output_max: float
    output_mean: float
    output_std: float
    output_num_nonfinite: int
    output_width: int
    output_spread: float
    output_is_unit: bool
    output_rows_sum_to_one: bool
