"""Samples weights and updates."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim

from .. import kernels
from ..kernels.tensors import NATIVE_DTYPES, plain
from ..records import TensorStats, values
from ..records.samples import WeightStats
from .observer import Observer
from .tensors import strided

_EVERY = 100
_MIN_BYTES, _MAX_SHARE = 1 << 20, 0.01  # of the copies, which may take the larger of the two; the share of the weights


class Sample(NamedTuple):
    """The result of `WeightSampler.before`."""

    # those that can be read, each with its place among all parameters of the optimizer
    parameters: list[tuple[Tensor, int]]
    rows: TensorStats  # statistics of each
    shares: list[int]  # number of elements of each to copy
    copies: list[Tensor]  # these elements


class WeightSampler:
    """Statistics of the parameters of one optimizer, and of their updates.

    `before` reads every parameter once and copies some evenly spaced elements of each; `after` compares these.
    `update_norm` is exact if the copies fit into the larger of 1 MiB and 1 % of the parameters. Otherwise it is an
    estimate: within 1 % from 10,000 elements of a parameter, unless a few elements hold most of the update.

    It samples steps whose number `every` divides. A skipped step changes nothing and has `update_norm` None; the next
    step is then sampled, too.

    Cost of a sampled step: one read of the parameters, and a few of the copies. On an accelerator, two syncs.

    >>> import torch
    >>> p = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer, sampler = torch.optim.SGD([p], lr=0.5), WeightSampler(every=1)
    >>> p.grad = torch.tensor([1.0, 0.0])
    >>> sample = sampler.before(optimizer)
    >>> optimizer.step()
    >>> sampler.after(sample, names=["w"])[0].update_ratio
    0.1
    """

    def __init__(self, every: int = _EVERY, *, backend: str = "auto") -> None:
        self.every = values.at_least(1, "every", every, "100 samples every hundredth step.")
        self.backend = kernels.resolve_backend(backend)
        self._is_owed = False

    def is_due(self, step: int) -> bool:
        """Whether to sample the step of that number. Cost: 0.1 us."""
        return self._is_owed or step % self.every == 0

    def before(self, optimizer: optim.Optimizer) -> Sample:
        """Reads the parameters, and copies some elements of each. Call it before the step."""
        every = (p for group in optimizer.param_groups for p in group["params"])
        chosen = [(p, k) for k, p in enumerate(every) if p.dtype in NATIVE_DTYPES and not p.is_meta]
        whole = [plain(p, i) for i, (p, *_) in enumerate(chosen)]
        rows, shares = self._rows(p.detach() for p, _ in chosen), self._shares(whole)
        return Sample(chosen, rows, shares, [strided(p, share).clone() for p, share in zip(whole, shares)])

    def _rows(self, tensors: Iterable[Tensor]) -> TensorStats:
        return TensorStats(kernels.run_stats(list(tensors), self.backend)[0])

    def _shares(self, parameters: Sequence[Tensor]) -> list[int]:
        """Number of elements to copy of each: all of small ones, as many as fit of others."""
        sizes = [p.nbytes for p in parameters]
        left = max(_MIN_BYTES, int(_MAX_SHARE * sum(sizes)))
        shares = [0] * len(sizes)
        for taken, i in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
            size = min(sizes[i], left // (len(sizes) - taken))
            left -= size
            shares[i] = size // parameters[i].itemsize
        return shares

    def after(
        self,
        sample: Sample,
        *,
        names: Sequence[str],
        gradient_norms: Mapping[str, float] | None = None,
        skipped: bool = False,
    ) -> tuple[WeightStats, ...]:
        """One `WeightStats` for each parameter, in the order of the groups. Call it after the step.

        There are `names` for all parameters of the optimizer; `gradient_norms` are unscaled and before clipping.
        """
        self._is_owed = skipped
        norms: list[float | None] = [None] * len(sample.parameters)
        if not skipped:
            whole = [plain(p, i) for i, (p, *_) in enumerate(sample.parameters)]
            with torch.no_grad():
                for copy, p, share in zip(sample.copies, whole, sample.shares):
                    copy.sub_(strided(p, share))
            sizes = [p.numel() / max(1, copy.numel()) for p, copy in zip(whole, sample.copies)]
            norms = [row.norm * math.sqrt(size) for row, size in zip(self._rows(sample.copies), sizes)]
            sample.copies.clear()
        return tuple(
            WeightStats(
                name=names[place],
                numel=row.numel,
                norm=row.norm,
                std=row.std,
                abs_max=row.abs_max,
                grad_norm=(gradient_norms or {}).get(names[place]),
                update_norm=norm,
                num_nonfinite=row.num_nans + row.num_infs,
            )
            for (_, place), row, norm in zip(sample.parameters, sample.rows, norms, strict=True)
        )


class WeightWatch(Observer):
    """Samples the weights of a guard's optimizers for the records of the due steps. Cost: that of `WeightSampler`."""

    what = "weight sampler"

    def __init__(self, run: Any, judge: Any, settings: Mapping[str, Any]) -> None:
        self._run, self._judge = run, weakref.proxy(judge)  # which leads to what closes this
        self._sampler = WeightSampler(**{"backend": run.backend, **settings})
        self._samples: list[tuple[Any, Sample]] = []

    def next_after(self, step: int) -> float:
        every = self._sampler.every
        return step + 1 if self._sampler.is_due(step + 1) else (step // every + 1) * every

    def before(self, step: int) -> None:
        members = [member for member in self._run.members if member.is_alive] if self._sampler.is_due(step) else []
        self._samples = [(member, self._sampler.before(member.optimizer)) for member in members]

    def after(self, step: int) -> None:
        samples, self._samples = self._samples, []
        if not samples:
            return
        started = time.perf_counter()
        self._judge.arrive_all()
        record, found = self._run.ring.latest(), list[WeightStats]()
        norms = dict(zip(record.tensors.names, record.tensors.norm, strict=True))
        for member, sample in samples:
            names = self._run.known_names[self._run.start_of(member) :]
            found += self._sampler.after(sample, names=names, gradient_norms=norms, skipped=record.skipped)
        self._run.ring.attach(record.step, weights=record.weights + tuple(found))
        self._judge.add_overhead(time.perf_counter() - started)

    def forget(self) -> None:
        self._samples = []


def sampler_settings(weights: bool | int | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The meaning of `wrap(weights=...)`: arguments of `WeightSampler`, or None for no sampling."""
    if weights is None or weights is False:
        return None
    if isinstance(weights, int):
        weights = {} if weights is True else {"every": weights}
    if not isinstance(weights, Mapping):
        raise TypeError(f"`weights` must be True, a number of steps or a dict, got {weights!r}")
    known = {"every", "backend"}
    if not weights.keys() <= known:
        raise TypeError(f"`weights` must have keys among {sorted(known)}, got {sorted(weights.keys() - known)}")
    WeightSampler(**weights)
    return dict(weights)
