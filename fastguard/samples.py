"""What is sampled beside the gradients: activations of modules, weights and updates. Vocabulary, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ActivationStats:
    """One tensor of activations, from one pass.

    NaN and Inf are counted and kept out of every other figure, with one exception: an Inf lies outside any range, so it
    counts as saturated too.

    Attributes:
        mean, std: over the finite elements; the population's standard deviation. NaN if there is none.
        min_val, max_val, abs_max: over the finite elements; NaN if there is none.
        num_zeros: exact zeros, of either sign.
        num_near_zero: finite elements with |x| below the near-zero threshold, zeros among them.
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

    @property
    def zero_ratio(self) -> float:
        """Share of exact zeros; 0.0 of nothing."""
        return self.num_zeros / self.total_elements if self.total_elements else 0.0

    @property
    def near_zero_ratio(self) -> float:
        """Share of near-zero elements; 0.0 of nothing."""
        return self.num_near_zero / self.total_elements if self.total_elements else 0.0

    @property
    def saturation_ratio(self) -> float:
        """Share of saturated elements; 0.0 of nothing."""
        return self.num_saturated / self.total_elements if self.total_elements else 0.0

    @property
    def is_finite(self) -> bool:
        """Whether no element is NaN or Inf."""
        return not self.num_nans and not self.num_infs


@dataclass(frozen=True, slots=True)
class ModuleActivity:
    """The output of one module at one sampled step.

    Attributes:
        name: the module's name in the model, without the prefixes of wrappers.
        family: how it was judged: "relu", "gelu", "tanh", "sigmoid", "hardtanh", "softmax", "attention", "norm",
            "block" or "other".
        stats: the output's statistics.
        order: place in the order of execution within its forward pass, from 0.
        inputs_finite: whether all its inputs were finite; None if not known.
        num_units: size of the unit (channel) dimension; 0 if units were not told apart.
        num_dead_units: units that were (near) zero nearly everywhere, in all batches of the monitor's window.
        num_saturated_units: the same, for saturation.
        dead_units: indices of the first 32 dead units.
        num_batches: how many batches the window held when units were judged.
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

    @property
    def dead_unit_ratio(self) -> float:
        """Share of units that are dead; 0.0 if units were not told apart."""
        return self.num_dead_units / self.num_units if self.num_units else 0.0

    @property
    def saturated_unit_ratio(self) -> float:
        """Share of units that are saturated; 0.0 if units were not told apart."""
        return self.num_saturated_units / self.num_units if self.num_units else 0.0

    @property
    def is_origin(self) -> bool:
        """Whether NaN or Inf came up in this module: its output is not finite, and its inputs were."""
        return self.inputs_finite is True and not self.stats.is_finite


@dataclass(frozen=True, slots=True)
class WeightStats:
    """One parameter at one sampled step.

    Attributes:
        name: the parameter's name.
        norm: 2-norm of the weights before the step.
        std, abs_max: of the weights, as in `ActivationStats`.
        grad_norm: 2-norm of its gradient before clipping, unscaled; None if it had none.
        update_norm: 2-norm of what the step changed it by; None if not measured, as at a skipped step.
        numel, num_nonfinite: elements; those of the weights that are NaN or Inf.
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
