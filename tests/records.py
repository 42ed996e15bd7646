"""Records of invented steps, made without torch."""

import math
import struct

from fastguard.records import BatchSample, StepStats, TensorRow, TensorStats, TrainingHistory
from fastguard.records.columns import COLUMNS, completed


def make_table(rows, names=None):
    """A `TensorStats` of `rows`, each in the order of `COLUMNS`; what a row is too short for is as in an old log."""
    flat = [float(value) for row in rows for value in completed(row)]
    return TensorStats(struct.pack(f"{len(flat)}d", *flat), names)


def make_row(norm=1.0, numel=4, *, num_zeros=0, num_nans=0, num_infs=0):
    """A row of `numel` equal elements with that norm; NaN and Inf elements come on top of the norm."""
    element = norm / math.sqrt(numel)
    row = TensorRow(
        numel=numel,
        sum_sq=norm * norm,
        sum=norm * math.sqrt(numel),
        abs_max=element,
        abs_min_nonzero=element,
        num_zeros=num_zeros,
        num_nans=num_nans,
        num_infs=num_infs,
        finite_norm=norm,
    )
    return list(row)


def make_record(step=0, norm=1.0, **fields):
    """A step whose one tensor `w` has that norm; a NaN or infinite `norm` puts one such element there."""
    if math.isfinite(norm):
        row = make_row(norm)
    else:
        row = make_row(1.0, num_nans=int(math.isnan(norm)), num_infs=int(math.isinf(norm)))
    return StepStats(step, make_table([row], ["w"]), **fields)


def make_bad_record(step, bad, names=("a", "b", "c"), **fields):
    """A skipped step with a NaN in each of the tensors `bad`."""
    rows = [make_row(num_nans=int(name in bad)) for name in names]
    return StepStats(step, make_table(rows, list(names)), **{"skipped": True, **fields})


def make_history(norms, **fields):
    """A history of steps with these norms; non-finite ones are skipped."""
    history = TrainingHistory()
    for step, norm in enumerate(norms):
        history.add(make_record(step, norm, skipped=not math.isfinite(norm), **fields))
    return history


def make_turning_history(norms, history=None, losses=()):
    """As `make_history`, of gradients that point elsewhere at each step, as those of other batches do."""
    history = TrainingHistory() if history is None else history
    for step, norm in enumerate(norms):
        row = make_row(norm)
        row[COLUMNS.index("sum")] *= math.cos(step)
        history.add(StepStats(step, make_table([row], ["w"]), loss=losses[step] if losses else None))
    return history


def make_batch(**fields):
    """A forward pass of a sound classifier in training; `fields` are what is otherwise."""
    usual = {
        **{"training": True, "with_grad": True, "num_samples": 16},
        **{"input_abs_max": 2.5, "input_mean": 0.0, "input_std": 1.0, "input_num_nonfinite": 0},
        **{"input_is_integer": False, "input_constant_share": 0.0, "input_digest": 2**62 + 1},
        **{"output_abs_max": 1.5, "output_min": -1.0, "output_max": 1.5, "output_mean": 0.0, "output_std": 0.5},
        **{"output_num_nonfinite": 0, "output_width": 4, "output_spread": 0.5},
        **{"output_is_unit": False, "output_rows_sum_to_one": False},
    }
    return BatchSample(**{**usual, **fields})
