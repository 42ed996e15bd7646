"""Random tensor lists through all kernels, each figure held against sums in exact arithmetic (`math.fsum`).

    python -m benchmarks.reliability.kernels                        # 10 000 lists; results/reliability-kernels.json
    python -m benchmarks.reliability.kernels --number 100 --seed 7 --dry
    .ci/sanitize address,undefined --fuzz 100000                    # the same on an instrumented extension

A case has a random state of its own, made of the seed and its number: `--first 4711 --number 1` runs one again. A
sanitizer ends the process with a report; what ran to its end under one is noted in the results beside the plain run.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import fastguard
from fastguard import UnsupportedTensorError, activation_stats, tensor_stats
from fastguard.kernels import cpu, run_activation, scale_
from fastguard.records import TensorRow, TensorStats, columns
from fastguard.records.slot import HEADER_BYTES, read_header

from .invented_tensors import REAL, Refused, plain_values, tensors

RESULTS = Path(__file__).resolve().parents[1] / "results" / "reliability-kernels.json"
_SHOWN = 20
_SUBNORMAL = 5e-324
_MAX = sys.float_info.max


class WrongError(Exception):
    """A figure that is not what it must be."""


def _hold(found: float, true: float, tolerance: float, what: str) -> None:
    same = found == true or (math.isnan(found) and math.isnan(true))
    if not same and not abs(found - true) <= tolerance:
        raise WrongError(f"{what} is {found!r}, not {true!r} within {tolerance!r}")


class Truth:
    """What the elements say in exact arithmetic: of shares of the largest, so that nothing over- or underflows.

    Attributes:
        row: as `TensorRow`; `sum_sq` and `sum_sq_dev` are left out.
        mean, std: of the finite elements.
        sum_abs: sum of magnitudes; Inf if it overflows.
    """

    def __init__(self, x: torch.Tensor) -> None:
        is_finite = x.isfinite()
        finite = x[is_finite]
        magnitude = finite.abs()
        nonzero = magnitude[magnitude > 0]
        largest = float(magnitude.max()) if len(finite) else 0.0
        exponent = min(max(math.frexp(largest)[1], -1020), 1020)
        shares = [math.ldexp(value, -exponent) for value in finite.tolist()]
        total, count = math.fsum(shares), max(1, len(shares))
        mean = total / count
        away = [share - mean for share in shares]
        deviations = math.fsum(d * d for d in away) - math.fsum(away) ** 2 / count
        self.mean, self.std = (
            self._scaled(mean, exponent),
            self._scaled(math.sqrt(max(0.0, deviations) / count), exponent),
        )
        self.norm = self._scaled(math.sqrt(math.fsum(share * share for share in shares)), exponent)
        self.sum_abs = self._scaled(math.fsum(map(abs, shares)), exponent)
        self.rms = self.norm / math.sqrt(count)
        self.finite = finite
        self.row = TensorRow(
            numel=len(x),
            sum=self._scaled(total, exponent),
            abs_max=largest,
            abs_min_nonzero=float(nonzero.min()) if len(nonzero) else 0.0,
            num_zeros=int((x == 0).sum()),
            num_nans=int(x.isnan().sum()),
            num_infs=int(x.isinf().sum()),
            finite_norm=self.norm,
        )

    @staticmethod
    def _scaled(value: float, exponent: int) -> float:
        return math.ldexp(value, exponent) if abs(value) < math.ldexp(1.0, min(1023, 1023 - exponent)) else math.inf


def hold_row(row: TensorRow, truth: Truth, *, exact: bool, what: str) -> None:
    """Counts and extremes to the bit, sums and norms as documented; `exact`: what was float64."""
    for column in columns.TABLE:
        if column.is_exact:
            _hold(getattr(row, column.name), getattr(truth.row, column.name), 0.0, f"{what}: {column.name}")
    relative = 1e-13 if exact else 1e-6
    _hold(row.finite_norm, truth.norm, relative * truth.norm + 2 * _SUBNORMAL, f"{what}: finite_norm")
    if truth.sum_abs < _MAX:
        _hold(row.sum, truth.row.sum, relative * truth.sum_abs + _SUBNORMAL, f"{what}: sum")
        if len(truth.finite):
            # Beyond the range of squares the spread comes from norm and mean: the root of what their rounding leaves.
            digits = 1e-13 if 1e-130 < truth.rms < 1e150 else 1e-6
            _hold(row.std, truth.std, 1e-4 * truth.std + digits * truth.rms + 4 * _SUBNORMAL, f"{what}: std")
    if columns.in_range(row.sum_sq):
        _hold(math.sqrt(row.sum_sq), truth.norm, relative * truth.norm, f"{what}: sum_sq")
    norm = math.nan if truth.row.num_nans else math.inf if truth.row.num_infs else row.finite_norm
    _hold(row.norm, norm, 0.0, f"{what}: norm")


def _describe(x: torch.Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} {x.layout} neg={x.is_neg()} conj={x.is_conj()}"


def _refused(given: Sequence[Any], first: int, reason: str) -> None:
    for call in (tensor_stats, lambda x: scale_(x, 2.0)):
        try:
            call(given)
        except UnsupportedTensorError as error:
            # Which of several is named first depends on what is asked of it; reading asks the first one.
            if call is tensor_stats and (error.index != first or not re.search(reason, str(error))):
                raise WrongError(f"refused for another reason: {error}") from error
        else:
            raise WrongError(f"{call} took what has no data: {reason}")


def stats_case(rng: random.Random, given: list[torch.Tensor], truths: list[Truth]) -> None:
    """`tensor_stats`, its total, and a line of a log."""
    stats = tensor_stats(given)
    for i, (row, truth, x) in enumerate(zip(stats, truths, given, strict=True)):
        exact = x.dtype in (torch.float64, torch.complex128)
        hold_row(row, truth, exact=exact, what=f"tensor {i} ({_describe(x)})")
    total = stats.total_row()
    if repr(columns.as_row(total)) != repr(columns.as_row(columns.fold_rows(stats))):
        raise WrongError(f"the total {total} is not the fold {columns.fold_rows(stats)}")
    largest = max((truth.norm for truth in truths), default=0.0)
    shares = [truth.norm / largest for truth in truths] if 0.0 < largest < math.inf else []
    if largest < math.inf:
        norm = largest * math.sqrt(math.fsum(share * share for share in shares))
        _hold(columns.as_row(total).finite_norm, norm, 1e-6 * norm + 4 * _SUBNORMAL, "norm of all")
    if cpu.json_line is not None:
        line = cpu.json_line(bytearray(HEADER_BYTES), 0, bytearray(stats.table.tobytes()), 1.5).decode()
        if json.dumps(json.loads(line), separators=(",", ":")) + "\n" != line:
            raise WrongError(f"not the line that json.dumps writes: {line}")


def scale_case(rng: random.Random, given: list[torch.Tensor], truths: list[Truth]) -> None:
    """`scale_` against torch's own product, bit for bit."""
    copies = [x.detach().clone() for x in given if x.layout is torch.strided and x.dtype.itemsize > 1]
    copies = [x.t() if x.dim() == 2 and rng.random() < 0.5 else x for x in copies]
    factor = rng.choice((0.5, 1.0, -2.0, 1e-3, 0.0, 0.3333333, 1e30, rng.random()))
    wanted = [x.clone() for x in copies]
    for x in wanted:
        (torch.view_as_real(x.resolve_conj().resolve_neg()) if x.is_complex() else x).mul_(factor)
    scale_(copies, factor)
    for x, want in zip(copies, wanted, strict=True):
        if not torch.equal(plain_values(x).nan_to_num(1.25), plain_values(want).nan_to_num(1.25)):
            raise WrongError(f"scale_ by {factor!r}: {_describe(x)}")


def activation_case(rng: random.Random, given: list[torch.Tensor], truths: list[Truth]) -> None:
    """`activation_stats`, and the table of channels, of the real ones."""
    for x, truth in zip(given, truths, strict=True):
        if x.is_complex():
            continue
        found = activation_stats(x, saturation=(-0.5, 0.75), near_zero=1e-3)
        row, what = truth.row, f"activation ({_describe(x)})"
        counts = (found.num_zeros, found.num_nans, found.num_infs, found.total_elements)
        if counts != (row.num_zeros, row.num_nans, row.num_infs, row.numel):
            raise WrongError(f"{what}: counts {counts}")
        if not len(truth.finite):
            continue
        _hold(found.min_val, float(truth.finite.min()), 0.0, f"{what}: min")
        _hold(found.max_val, float(truth.finite.max()), 0.0, f"{what}: max")
        saturated = int(((truth.finite < -0.5) | (truth.finite > 0.75)).sum()) + row.num_infs
        near = int((truth.finite.abs() < 1e-3).sum())
        if (found.num_saturated, found.num_near_zero) != (saturated, near):
            raise WrongError(f"{what}: saturated or near zero")
        if truth.sum_abs < 1e300:
            slack = 1e-14 * truth.rms + 2 * _SUBNORMAL
            _hold(found.mean, truth.mean, 3e-6 * truth.std + slack, f"{what}: mean")
            if found.std != math.inf or truth.std < 1e148:
                _hold(
                    found.std,
                    truth.std,
                    3e-6 * truth.std + slack + (1e-150 if truth.std < 1e-140 else 0.0),
                    f"{what}: std",
                )
        if x.layout is torch.strided and x.dim() and x.numel():
            dim = rng.randrange(x.dim())
            table = memoryview(run_activation(x, (-0.5, 0.75, 1e-3), dim, "auto")[1] or b"").cast("d")
            if (sum(table[::4]), sum(table[1::4])) != (near, saturated):
                raise WrongError(f"{what}: channels of {dim}")
            if sum(table[2::4]) != row.num_nans + row.num_infs:
                raise WrongError(f"{what}: channels of {dim}: not finite")


def step_case(rng: random.Random, given: list[torch.Tensor], truths: list[Truth]) -> None:
    """A whole step as the guard takes it, with clipping: norm, coefficient, and the gradients after it."""
    if cpu.take_step is None:
        return
    gradients = [x.detach().clone() for x in given if x.dtype in REAL and x.layout is torch.strided and not x.is_neg()]
    parameters = [torch.nn.Parameter(torch.empty_like(g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    before = [g.clone() for g in gradients]
    headers = bytearray(HEADER_BYTES)
    max_norm = 10.0 ** rng.uniform(-5, 5)
    found: list[Any] = [None] * 6
    outcome = cpu.take_step([{"params": parameters, "lr": 0.1}], headers, 0, found, 3, 1, max_norm, True, True)
    if outcome & 1:
        raise WrongError("a step of plain gradients was odd")
    header = read_header(headers)
    row = TensorStats(found[0]).total_row()
    norm = columns.norm_of(*columns.norm_parts(row))
    _hold(header.norm, norm, 0.0, "norm of the step")
    coefficient = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0
    _hold(header.clip_coef, coefficient, 0.0, "coefficient")
    if header.skipped is not (not math.isfinite(norm)):
        raise WrongError(f"skipped is {header.skipped} at a norm of {norm}")
    for gradient, old in zip(gradients, before, strict=True):
        want = old if coefficient == 1.0 else old * torch.tensor(coefficient, dtype=torch.float64).item()
        if not torch.equal(gradient.double().nan_to_num(1.25), want.double().nan_to_num(1.25)):
            raise WrongError(f"clipping by {coefficient!r}: {_describe(gradient)}")


CASES: tuple[Callable[[random.Random, list[torch.Tensor], list[Truth]], None], ...] = (
    stats_case,
    scale_case,
    activation_case,
    step_case,
)


def attempt(seed: int, case: int) -> str:
    """One list through everything; says what became of it.

    Raises:
        WrongError: a figure is wrong.
    """
    rng = random.Random(f"{seed}/{case}")
    made = tensors(rng)
    refused = [i for i, x in enumerate(made) if isinstance(x, Refused)]
    if refused:
        first = made[refused[0]]
        assert isinstance(first, Refused)
        _refused([x.tensor if isinstance(x, Refused) else x for x in made], refused[0], first.reason)
    given = [x for x in made if not isinstance(x, Refused)]
    truths = [Truth(plain_values(x)) for x in given]
    for run in CASES:
        run(rng, given, truths)
    return "refused" if refused else "read"


def sanitizers() -> list[str]:
    """Those that the extension was built with, as far as their libraries tell."""
    try:
        loaded = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return []
    return [name for name, library in (("address", "libasan"), ("undefined", "libubsan")) if library in loaded]


def run(number: int, seed: int, first: int = 0, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Tries `number` lists; counts as the results' file has them."""
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in range(first, first + number):
            try:
                outcomes[attempt(seed, case)] += 1
            except Exception as error:  # whatever a kernel may raise: told with its number, and the next one is tried
                wrong.append(f"case {case} of seed {seed}: {type(error).__name__}: {error}")
                say(wrong[-1] + "\n" + traceback.format_exc())
    return {
        "number": number,
        "num_wrong": len(wrong),
        "seed": seed,
        "num_refused": outcomes["refused"],
        "wrong": wrong[:_SHOWN],
        "cpu_s": round(time.process_time() - started, 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=10_000, help="how many lists (default: 10000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--dry", action="store_true", help="save nothing")
    parser.add_argument("--save", type=Path, default=RESULTS, help="where to")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = run(
        arguments.number, arguments.seed, arguments.first, lambda line: print(line, file=sys.stderr, flush=True)
    )
    under = sanitizers()
    conditions = {
        "fastguard": fastguard.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "compiler": cpu._C.compiler,
    }
    print(json.dumps({**found, "sanitizers": under}, indent=2))
    if not arguments.dry:
        path = arguments.save
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if under:
            beside = {"number": found["number"], "num_reported": 0, "num_wrong": found["num_wrong"]}
            results = {**known, "sanitized": beside}
        else:
            results = {**found, **conditions, **{k: known[k] for k in ("sanitized",) if k in known}}
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return int(bool(found["num_wrong"]))


if __name__ == "__main__":
    sys.exit(main())
