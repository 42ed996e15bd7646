"""What the columns must be, written with NumPy and Python integers; shares no code with any backend."""

import math

import numpy as np
import torch

from fastguard.records.columns import TABLE, TensorRow

import tolerances


def elements(tensor):
    """All real numbers of `tensor` as float64."""
    t = tensor.detach().resolve_conj().resolve_neg().cpu()
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.double().reshape(-1).numpy()


def expected(tensor):
    x = elements(tensor)
    finite = x[np.isfinite(x)]
    magnitude = np.abs(finite)
    nonzero = magnitude[magnitude > 0]
    deviations = finite - finite.mean() if finite.size else finite
    largest = float(magnitude.max(initial=0.0))
    shares = magnitude / largest if largest else magnitude
    return TensorRow(
        numel=x.size,
        sum_sq=float((finite * finite).sum()),  # pairwise: to a few times 1e-16
        sum=float(finite.sum()),
        abs_max=float(magnitude.max(initial=0.0)),
        abs_min_nonzero=float(nonzero.min()) if nonzero.size else 0.0,
        num_zeros=int((x == 0).sum()),
        num_nans=int(np.isnan(x).sum()),
        num_infs=int(np.isinf(x).sum()),
        sum_sq_dev=float((deviations * deviations).sum() - deviations.sum() ** 2 / max(1, finite.size)),
        finite_norm=largest * math.sqrt(float((shares * shares).sum())),
    )


def assert_row(row, tensor, what=""):
    """`row` is right for `tensor`: counts and extremes exactly, sums within tolerances.py."""
    truth = expected(tensor)
    assert row.finite_norm == Close(truth.finite_norm, tolerances.NORM), f"{what}: finite_norm"
    assert math.sqrt(row.sum_sq) == Close(math.sqrt(truth.sum_sq), tolerances.NORM), f"{what}: sum_sq"
    values = elements(tensor)
    magnitudes = np.abs(values[np.isfinite(values)])
    for column in TABLE:
        found, true = getattr(row, column.name), getattr(truth, column.name)
        if column.is_exact:
            assert found == true, f"{what}: {column.name}"
        elif column.name not in ("sum_sq", "finite_norm"):
            assert abs(found - true) <= tolerances.SUM * (magnitudes**column.power).sum(), f"{what}: {column.name}"
    assert math.isnan(row.norm) == (truth.num_nans > 0), f"{what}: norm"
    assert math.isinf(row.norm) == (truth.num_infs > 0 and truth.num_nans == 0), f"{what}: norm"


class Close:
    """Equal within a relative tolerance, without an absolute one: values of 1e-30 must come out as such."""

    def __init__(self, value, tolerance):
        self.value, self.tolerance = value, tolerance

    def __eq__(self, other):
        return isinstance(other, float) and abs(other - self.value) <= self.tolerance * abs(self.value)

    def __repr__(self):
        return f"{self.value!r} ± {self.tolerance:g} (relative)"

    __hash__ = None
