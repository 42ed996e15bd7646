"""What else is compared. Every rival says how it is called, and proves its result against float64 before it is timed.

The clipping rivals are those of `fastguard bench`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import fastguard
from fastguard.commands.bench import WrongResultError
from fastguard.kernels import backends

from . import clipping, truth
from .clipping import Subject, require_close, tolerance
from .truth import Stats

_OURS = 1e-6  # what fastguard promises
_BLOCK = 1 << 24


@dataclass(frozen=True)
class Rival:
    """One way to do a job.

    Attributes:
        prepare: makes the call that is timed.
        check: compares the result of the first call with the truth, and returns its relative error in the norm (None
            for rivals without one); raises WrongResultError.
        missing: why it cannot run here; None if it can.
        scales: it changes the gradients at every call.
    """

    name: str
    title: str
    prepare: Callable[[Subject], Callable[[], Any]]
    check: Callable[[Any, Subject], float | None]
    missing: Callable[[], str | None] = lambda: None
    scales: bool = False


def _no_extension() -> str | None:
    return backends()["cpu"].reason


def _no_numpy() -> str | None:
    return None if importlib.util.find_spec("numpy") else "needs numpy: pip install 'fastguard[bench]'"


def _require(holds: bool, what: str, found: float, true: float) -> None:
    if not holds:
        raise WrongResultError(f"{what}: found {found!r}, in float64 it is {true!r}")


def _check_stats(found: Stats, true: Stats, tolerances: tuple[float, float], where: str) -> None:
    for_norm, for_sums = tolerances
    spread = math.hypot(true.mean, true.std)  # the root mean square, which the errors of sums are relative to
    require_close(f"{where}: norm", found.norm, true.norm, for_norm)
    _require(abs(found.mean - true.mean) <= for_sums * spread, f"{where}: mean", found.mean, true.mean)
    _require(abs(found.std - true.std) <= for_sums * spread, f"{where}: std", found.std, true.std)
    for column in ("max_val", "min_val", "num_zeros", "num_nans", "num_infs"):
        exact, got = getattr(true, column), getattr(found, column)
        _require(got == exact, f"{where}: {column}", got, exact)


def _their_tolerances(subject: Subject) -> tuple[float, float]:
    """Of norms and of other sums: others add in float32, in the gradients' dtype."""
    return tolerance("theirs", subject), 2e-3 + 4 * torch.finfo(subject.case.dtype).eps


def _check_our_rows(result: Sequence[Stats], subject: Subject, tolerances: Any = (_OURS, _OURS)) -> None:
    for index, (found, true) in enumerate(zip(result, truth.rows(subject), strict=True)):
        _check_stats(found, true, tolerances, f"tensor {index}")


def _check_their_rows(result: Sequence[Stats], subject: Subject) -> None:
    _check_our_rows(result, subject, _their_tolerances(subject))


def _check_their_total(result: Stats, subject: Subject) -> float:
    true = truth.total(subject)
    _check_stats(result, true, _their_tolerances(subject), "all tensors")
    return abs(result.norm - true.norm) / true.norm


def _of_row(row: fastguard.records.TensorRow) -> Stats:
    return Stats(
        row.norm, row.abs_max, row.abs_min_nonzero, row.mean, row.std, row.num_zeros, row.num_nans, row.num_infs
    )


def _check_tensor_stats(result: fastguard.TensorStats, subject: Subject) -> float:
    _check_our_rows([_of_row(row) for row in result], subject)
    t, true = result.total(), truth.total(subject)
    found = Stats(t.norm, t.max_val, t.min_val, t.mean, t.std, t.num_zeros, t.num_nans, t.num_infs)
    _check_stats(found, true, (_OURS, _OURS), "all tensors")
    return abs(found.norm - true.norm) / true.norm


def separate_ops(gradients: Sequence[torch.Tensor]) -> list[Stats]:
    """Every statistic of every tensor as its own torch op, with `.item()`."""
    rows = []
    for g in gradients:
        magnitude = g.abs()
        rows.append(
            Stats(
                norm=torch.linalg.vector_norm(g).item(),
                max_val=magnitude.max().item(),
                min_val=magnitude.masked_fill(magnitude == 0, math.inf).min().item(),
                mean=g.mean().item(),
                std=g.std(correction=0).item(),
                num_zeros=int((g == 0).sum().item()),
                num_nans=int(g.isnan().sum().item()),
                num_infs=int(g.isinf().sum().item()),
            )
        )
    return rows


def toolkit_stats(gradients: Sequence[torch.Tensor]) -> Stats:
    """The toolkit's `GradientStats.from_gradients`: numpy over a concatenation.

    In float32, as `Tensor.numpy` hands it over, which is quicker than the float64 of arrays that numpy makes itself.
    """
    import numpy as np

    arrays = [(g if g.dtype is torch.float32 else g.float()).numpy() for g in gradients]
    flat = np.concatenate([array.ravel() for array in arrays])
    magnitude = np.abs(flat)
    nonzero = magnitude[magnitude > 0]
    return Stats(
        norm=float(np.linalg.norm(flat)),
        max_val=float(magnitude.max()),
        min_val=float(nonzero.min()),
        mean=float(flat.mean()),
        std=float(flat.std()),
        num_zeros=int((flat == 0).sum()),
        num_nans=int(np.isnan(flat).sum()),
        num_infs=int(np.isinf(flat).sum()),
    )


def _on_gradients(function: Callable[..., Any]) -> Callable[[Subject], Callable[[], Any]]:
    return lambda subject: lambda: function(subject.gradients)


def _all_rows(gradients: Sequence[torch.Tensor]) -> list[Stats]:
    return [_of_row(row) for row in fastguard.tensor_stats(gradients)]


def _read_stream(prefetch: bool) -> Callable[[Subject], Callable[[], Any]]:
    def prepare(subject: Subject) -> Callable[[], Any]:
        from fastguard import _C

        return lambda: _C.read_stream(subject.gradients, torch.get_num_threads(), prefetch)

    return prepare


def _check_words(result: Any, subject: Subject) -> None:
    true = truth.word_sum(subject)
    _require(result == true, "sum of 64-bit words", result, true)


def _memcpy(subject: Subject) -> Callable[[], Any]:
    source = torch.cat([g.flatten() for g in subject.gradients])
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _check_copy(result: Any, subject: Subject) -> None:
    found = math.sqrt(math.fsum(float(block.double().square().sum()) for block in result.split(_BLOCK)))
    require_close("norm of the copy", found, subject.norm_now(), 1e-12)


def _clip(name: str, side: str, title: str, *, clips: bool = False) -> Rival:
    """Clipping as `fastguard bench` has it; `side` is "ours" or "theirs"."""
    return Rival(
        name,
        f"{title}, {'clipping at every call' if clips else 'not clipping'}",
        lambda subject: clipping.call_on(side, subject, clips=clips),
        lambda result, subject: clipping.check(side, result, subject, clips=clips),
        scales=clips,
    )


def _norm(name: str, side: str, title: str, function: Callable[..., Any]) -> Rival:
    return Rival(name, title, _on_gradients(function), lambda result, subject: clipping.check(side, result, subject))


RIVALS = {
    rival.name: rival
    for rival in (
        _clip("clip", "ours", "fastguard.clip_grad_norm_"),
        _clip("torch-clip", "theirs", "torch clip_grad_norm_"),
        _clip("clip-always", "ours", "fastguard.clip_grad_norm_", clips=True),
        _clip("torch-clip-always", "theirs", "torch clip_grad_norm_", clips=True),
        _norm("norm", "ours", "fastguard.get_total_norm", fastguard.get_total_norm),
        _norm("torch-norm", "theirs", "torch get_total_norm", torch.nn.utils.get_total_norm),
        Rival("stats", "fastguard.tensor_stats", _on_gradients(fastguard.tensor_stats), _check_tensor_stats),
        Rival("read", "plain read stream", _read_stream(False), _check_words, _no_extension),
        Rival("read-prefetch", "plain read stream, prefetching", _read_stream(True), _check_words, _no_extension),
        Rival("memcpy", "memcpy (torch copy_ of one tensor)", _memcpy, _check_copy),
        Rival("stats-rows", "all statistics as Python numbers: fastguard", _on_gradients(_all_rows), _check_our_rows),
        Rival(
            "separate-ops",
            "all statistics: separate torch ops, .item() each",
            _on_gradients(separate_ops),
            _check_their_rows,
        ),
        Rival(
            "toolkit",
            "all statistics: the toolkit's numpy GradientStats, float32",
            _on_gradients(toolkit_stats),
            _check_their_total,
            _no_numpy,
        ),
    )
}
