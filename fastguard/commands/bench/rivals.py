"""What is compared. Every rival says how it is called, and proves its result against float64 before it is timed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import fastguard
from fastguard.kernels import backends

from .subject import Stats, Subject

NO_CLIPPING = 1e9  # a max_norm that is never reached
BENCH_EXTRA = "pip install 'fastguard[bench]'"
_FADE = 0.99
_FLOAT32_NORM_MAX = 50_000_000


class WrongResultError(RuntimeError):
    """A rival's result is not what float64 says; nothing is timed then."""


@dataclass(frozen=True)
class Rival:
    """One way to do a job.

    Attributes:
        prepare: makes the call that is timed.
        check: compares the result of the first call with the truth, and returns its relative error in the norm (None
            for rivals without one); raises WrongResultError.
        missing: why it cannot run here; None if it can.
        scales: it changes the gradients at every call.
        other_threads: it starts threads that are not torch's, which go on spinning for a while after the call.
    """

    name: str
    title: str
    prepare: Callable[[Subject], Callable[[], Any]]
    check: Callable[[Any, Subject], float | None]
    missing: Callable[[], str | None] = lambda: None
    scales: bool = False
    other_threads: bool = False


def _no_extension() -> str | None:
    return backends()["cpu"].reason


def _no_numpy() -> str | None:
    return None if importlib.util.find_spec("numpy") else f"needs numpy: {BENCH_EXTRA}"


def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _ours(subject: Subject) -> float:
    """What fastguard promises: 1e-6."""
    return 1e-6


def _ours_rounded(subject: Subject) -> float:
    """The same, returned in the gradients' dtype as torch does."""
    return 1e-6 + _epsilon(subject.case.dtype)


def _theirs(subject: Subject) -> float:
    """What others can do: they add in float32 and return the gradients' dtype."""
    return 2e-3 + 4 * _epsilon(subject.case.dtype)


def _their_norm(subject: Subject) -> float:
    """The same for norms. torch adds the squares of one tensor in a few float32 lanes, which lose more the more they
    hold: it is off by 3e-3 at 38M elements, by 1e-2 at 100M. From 50M on its error is told and not judged."""
    largest = max(g.numel() for g in subject.gradients)
    return 5e-3 + _theirs(subject) if largest < _FLOAT32_NORM_MAX else math.inf


def _require(holds: bool, what: str, found: float, true: float) -> None:
    if not holds:
        raise WrongResultError(f"{what}: found {found!r}, in float64 it is {true!r}")


def _error(found: float, true: float) -> float:
    return abs(found - true) / true


def _norm_within(tolerance: Callable[[Subject], float]) -> Callable[[Any, Subject], float]:
    def check(result: Any, subject: Subject) -> float:
        error = _error(float(result), subject.norm)
        _require(error <= tolerance(subject), "norm", float(result), subject.norm)
        return error

    return check


def _clipped_within(tolerance: Callable[[Subject], float]) -> Callable[[Any, Subject], float]:
    def check(result: Any, subject: Subject) -> float:
        after, true = subject.norm_now(), subject.limit * subject.norm / (subject.norm + 1e-6)
        _require(_error(after, true) <= tolerance(subject), "norm after clipping", after, true)
        return _norm_within(tolerance)(result, subject)

    return check


def _check_stats(found: Stats, true: Stats, tolerances: tuple[float, float], where: str) -> None:
    norm_tolerance, tolerance = tolerances
    spread = math.hypot(true.mean, true.std)  # the root mean square, which the errors of sums are relative to
    _require(_error(found.norm, true.norm) <= norm_tolerance, f"{where}: norm", found.norm, true.norm)
    _require(abs(found.mean - true.mean) <= tolerance * spread, f"{where}: mean", found.mean, true.mean)
    _require(abs(found.std - true.std) <= tolerance * spread, f"{where}: std", found.std, true.std)
    for column in ("max_val", "min_val", "num_zeros", "num_nans", "num_infs"):
        exact, got = getattr(true, column), getattr(found, column)
        _require(got == exact, f"{where}: {column}", got, exact)


def _rows_within(norm: Callable[[Subject], float], sums: Callable[[Subject], float]) -> Callable[[Any, Subject], None]:
    def check(result: Sequence[Stats], subject: Subject) -> None:
        tolerances = norm(subject), sums(subject)
        for index, (found, true) in enumerate(zip(result, subject.rows, strict=True)):
            _check_stats(found, true, tolerances, f"tensor {index}")

    return check


def _total_within(
    norm: Callable[[Subject], float], sums: Callable[[Subject], float]
) -> Callable[[Any, Subject], float]:
    def check(result: Stats, subject: Subject) -> float:
        _check_stats(result, subject.total, (norm(subject), sums(subject)), "all tensors")
        return _error(result.norm, subject.norm)

    return check


def _of_row(row: fastguard.stats.TensorRow) -> Stats:
    return Stats(
        row.norm, row.abs_max, row.abs_min_nonzero, row.mean, row.std, row.num_zeros, row.num_nans, row.num_infs
    )


def _check_tensor_stats(result: fastguard.TensorStats, subject: Subject) -> float:
    _rows_within(_ours, _ours)([_of_row(row) for row in result], subject)
    return _total_within(_ours, _ours)(Stats(*_total_fields(result)), subject)


def _total_fields(result: fastguard.TensorStats) -> tuple[Any, ...]:
    t = result.total()
    return t.norm, t.max_val, t.min_val, t.mean, t.std, t.num_zeros, t.num_nans, t.num_infs


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


def _clip(function: Callable[..., Any]) -> Callable[[Subject], Callable[[], Any]]:
    def prepare(subject: Subject) -> Callable[[], Any]:
        parameters = subject.parameters
        return lambda: function(parameters, NO_CLIPPING)

    return prepare


def _clip_always(function: Callable[..., Any]) -> Callable[[Subject], Callable[[], Any]]:
    def prepare(subject: Subject) -> Callable[[], Any]:
        parameters = subject.parameters

        def call() -> Any:
            subject.limit *= _FADE
            return function(parameters, subject.limit)

        return call

    return prepare


def _on_gradients(function: Callable[..., Any]) -> Callable[[Subject], Callable[[], Any]]:
    def prepare(subject: Subject) -> Callable[[], Any]:
        gradients = subject.gradients
        return lambda: function(gradients)

    return prepare


def _all_rows(gradients: Sequence[torch.Tensor]) -> list[Stats]:
    return [_of_row(row) for row in fastguard.tensor_stats(gradients)]


def _read_stream(prefetch: bool) -> Callable[[Subject], Callable[[], Any]]:
    def prepare(subject: Subject) -> Callable[[], Any]:
        from fastguard import _C

        gradients = subject.gradients
        return lambda: _C.read_stream(gradients, torch.get_num_threads(), prefetch)

    return prepare


def _check_words(result: Any, subject: Subject) -> None:
    true = subject.word_sum()
    _require(result == true, "sum of 64-bit words", result, true)


def _memcpy(subject: Subject) -> Callable[[], Any]:
    source = torch.cat([g.flatten() for g in subject.gradients])
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _check_copy(result: Any, subject: Subject) -> None:
    true = subject.norm_now()
    found = math.sqrt(math.fsum(float(block.double().square().sum()) for block in result.split(1 << 24)))
    _require(_error(found, true) <= 1e-12, "norm of the copy", found, true)


_torch_clip, _our_clip = torch.nn.utils.clip_grad_norm_, fastguard.clip_grad_norm_
_torch_norm, _our_norm = torch.nn.utils.get_total_norm, fastguard.get_total_norm

RIVALS = {
    rival.name: rival
    for rival in (
        Rival("clip", "fastguard.clip_grad_norm_, not clipping", _clip(_our_clip), _norm_within(_ours_rounded)),
        Rival("torch-clip", "torch clip_grad_norm_, not clipping", _clip(_torch_clip), _norm_within(_their_norm)),
        Rival("norm", "fastguard.get_total_norm", _on_gradients(_our_norm), _norm_within(_ours_rounded)),
        Rival("torch-norm", "torch get_total_norm", _on_gradients(_torch_norm), _norm_within(_their_norm)),
        Rival("stats", "fastguard.tensor_stats", _on_gradients(fastguard.tensor_stats), _check_tensor_stats),
        Rival("read", "plain read stream", _read_stream(False), _check_words, _no_extension),
        Rival("read-prefetch", "plain read stream, prefetching", _read_stream(True), _check_words, _no_extension),
        Rival("memcpy", "memcpy (torch copy_ of one tensor)", _memcpy, _check_copy),
        Rival(
            "stats-rows",
            "all statistics as Python numbers: fastguard",
            _on_gradients(_all_rows),
            _rows_within(_ours, _ours),
        ),
        Rival(
            "separate-ops",
            "all statistics: separate torch ops, .item() each",
            _on_gradients(separate_ops),
            _rows_within(_their_norm, _theirs),
        ),
        Rival(
            "toolkit",
            "all statistics: the toolkit's numpy GradientStats, float32",
            _on_gradients(toolkit_stats),
            _total_within(_their_norm, _theirs),
            _no_numpy,
            other_threads=True,
        ),
        Rival(
            "clip-always",
            "fastguard.clip_grad_norm_, clipping at every call",
            _clip_always(_our_clip),
            _clipped_within(_ours_rounded),
            scales=True,
        ),
        Rival(
            "torch-clip-always",
            "torch clip_grad_norm_, clipping at every call",
            _clip_always(_torch_clip),
            _clipped_within(_their_norm),
            scales=True,
        ),
    )
}
