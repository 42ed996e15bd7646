"""What activation statistics must be, written with NumPy; shares no code with any backend."""

import math

import numpy as np

from fastguard import ActivationStats

import tolerances
from truth import elements

LOW, HIGH, NEAR = -0.99, 0.99, 1e-6


def mean_and_std(values):
    """Of finite values; scaled by a power of two so that no square leaves float64's range.

    What rounding did to the first mean shows in the deviations from it, and is added: what remains are a few roundings
    of the deviations, at 1e-16 each.
    """
    largest = float(np.abs(values).max(initial=0.0))
    scale = 2.0 ** math.frexp(largest)[1] if 0 < largest < 2.0**1000 else 1.0
    scaled = values / scale
    mean = scaled.mean()
    mean += (scaled - mean).mean()
    deviations = scaled - mean
    return float(mean * scale), math.sqrt((deviations * deviations).mean()) * scale


def expected(tensor, low=LOW, high=HIGH, near=NEAR):
    x = elements(tensor)
    finite = x[np.isfinite(x)]
    mean, std = mean_and_std(finite) if finite.size else (math.nan, math.nan)
    return ActivationStats(
        mean=mean,
        std=std,
        min_val=float(finite.min()) if finite.size else math.nan,
        max_val=float(finite.max()) if finite.size else math.nan,
        abs_max=float(np.abs(finite).max()) if finite.size else math.nan,
        num_zeros=int((x == 0).sum()),
        num_near_zero=int(((np.abs(finite) < near) | (finite == 0)).sum()),
        num_saturated=int(((finite < low) | (finite > high)).sum() + np.isinf(x).sum()),
        num_nans=int(np.isnan(x).sum()),
        num_infs=int(np.isinf(x).sum()),
        total_elements=x.size,
    )


EXACT = (
    *("min_val", "max_val", "abs_max", "num_zeros", "num_near_zero", "num_saturated"),
    *("num_nans", "num_infs", "total_elements"),
)


def assert_stats(stats, truth, what=""):
    """Counts and extremes exactly, mean and std within tolerances.py."""
    for field in EXACT:
        found, right = getattr(stats, field), getattr(truth, field)
        assert found == right or (found != found and right != right), f"{what}: {field} is {found}, not {right}"
    if math.isnan(truth.mean):
        assert math.isnan(stats.mean) and math.isnan(stats.std), what
        return
    # A constant's deviations are nothing but the rounding of its mean.
    rounding = 2.0**-50 * truth.abs_max
    assert abs(stats.std - truth.std) <= tolerances.ACTIVATION_STD * truth.std + rounding, f"{what}: std"
    assert abs(stats.mean - truth.mean) <= tolerances.ACTIVATION_MEAN * truth.std + rounding, f"{what}: mean"


def channels(tensor, dim):
    """[C, elements] as float64."""
    x = tensor.reshape(1) if tensor.dim() == 0 else tensor
    x = x.detach().movedim(dim, 0).double().cpu()
    return x.reshape(x.shape[0], math.prod(x.shape[1:])).numpy()


def expected_table(tensor, dim, low=LOW, high=HIGH, near=NEAR):
    """CHANNEL_COLUMNS of each channel, [C, 4]."""
    x = channels(tensor, dim)
    finite = np.isfinite(x)
    magnitude = np.abs(x)
    outside = np.isinf(x) | (x < low) | (x > high)
    sums = np.where(finite, magnitude, 0.0).sum(1)  # of one sign, pairwise: to a few times 1e-16
    near_zero = (magnitude < near) | (x == 0)
    return np.stack([near_zero.sum(1), outside.sum(1), (~finite).sum(1), sums], axis=1)
