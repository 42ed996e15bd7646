"""Samples weights and updates, and prints a table of gradients."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim

from .. import kernels
from .._text import NAME_WIDTH, in_columns, listed, shown
from ..kernels.tensors import NATIVE_DTYPES, plain
from ..names import check_models, named_parameters
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

    Args:
        every: sample steps whose number it divides. A skipped step changes nothing and has `update_norm` None; the
            next step is then sampled, too.
        backend: as for `fastguard.tensor_stats`.

    Raises:
        ValueError: `every` is not an integer >= 1.

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

        Args:
            sample: from `before`.
            names: one for each parameter of the optimizer.
            gradient_norms: norms of the gradients by name, unscaled and before clipping.
            skipped: the step changed nothing: it has no update, and the next step is due.
        """
        self._is_owed = skipped
        norms = [None] * len(sample.parameters) if skipped else self._update_norms(sample)
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

    def _update_norms(self, sample: Sample) -> Sequence[float | None]:
        whole = [plain(p, i) for i, (p, *_) in enumerate(sample.parameters)]
        with torch.no_grad():
            for copy, p, share in zip(sample.copies, whole, sample.shares):
                copy.sub_(strided(p, share))
        sizes = [p.numel() / max(1, copy.numel()) for p, copy in zip(whole, sample.copies)]
        rows = self._rows(sample.copies)
        sample.copies.clear()
        return [row.norm * math.sqrt(size) for row, size in zip(rows, sizes)]


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
            about = {"names": names, "gradient_norms": norms, "skipped": record.skipped}
            found += self._sampler.after(sample, **about)
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


class GradientLine(NamedTuple):
    """One parameter."""

    name: str  # without the prefixes of wrappers
    shape: tuple[int, ...]
    grad_norm: float | None  # 2-norm of its gradient; None if it has none
    weight_norm: float  # 2-norm of the parameter
    num_zeros: int  # like the next two, elements of the gradient
    num_nans: int
    num_infs: int
    num_elements: int  # of the gradient, 0 if it has none; real and imaginary parts count apart

    @property
    def ratio(self) -> float | None:
        """Gradient norm over weight norm; None without a gradient or with weights that are all zero."""
        return None if self.grad_norm is None or not self.weight_norm else self.grad_norm / self.weight_norm


_HEADINGS = ("parameter", "shape", "grad norm", "weight norm", "ratio", "zeros", "NaN", "Inf")


class GradientTable(list[GradientLine]):
    """Lines of `check_gradients`, in the model's order: iterate, index by position or by name, or print it."""

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        found = next((line for line in self if line.name == key), None)
        if found is None:
            names = listed((line.name for line in self), 8)
            raise KeyError(f"no parameter is named '{shown(key)}'; the names are: {names}")
        return found

    @property
    def norm(self) -> float:
        """2-norm of all gradients together, as torch has it: NaN if any is, else Inf if any is."""
        norms = [line.grad_norm for line in self if line.grad_norm is not None]
        return math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)

    def __str__(self) -> str:
        rows = [_HEADINGS, *map(_cells, self)]
        text = in_columns(rows, left=(0, 1))
        text.insert(1, "-" * len(text[0]))
        missing = sum(line.grad_norm is None for line in self)
        text.append(f"norm of all gradients: {self.norm:.4g}" + (f"; {missing} without a gradient" if missing else ""))
        return "\n".join(text)


def _cells(line: GradientLine) -> tuple[str, ...]:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3e}"

    zeros = f"{line.num_zeros / line.num_elements:.1%}" if line.num_elements else "-"
    shape = "x".join(map(str, line.shape)) or "scalar"
    numbers = (number(line.grad_norm), number(line.weight_norm), number(line.ratio))
    return (shown(line.name, NAME_WIDTH), shape, *numbers, zeros, str(line.num_nans or ""), str(line.num_infs or ""))


def check_gradients(model: torch.nn.Module, *, backend: str = "auto") -> GradientTable:
    """A table of gradients and weights, one line a parameter; `print` it.

    Call it after `backward`, before `step`. Gradients are as they are found: still scaled under a GradScaler, and
    summed over the batches of an accumulation.

    Args:
        model: a module.
        backend: as for `fastguard.tensor_stats`.

    Raises:
        TypeError: `model` is no module.
        UnsupportedTensorError: a parameter that cannot be read; names it.

    Cost: one read of every parameter and every gradient, in one call; synchronises on an accelerator.

    >>> import torch, fastguard
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> _ = torch.nn.init.constant_(model.weight, 0.5)
    >>> model(torch.tensor([[3.0, 4.0]])).backward()
    >>> print(fastguard.tools.check_gradients(model))
    parameter  shape  grad norm  weight norm      ratio  zeros  NaN  Inf
    --------------------------------------------------------------------
    weight     1x2    5.000e+00    7.071e-01  7.071e+00   0.0%
    norm of all gradients: 5
    """
    check_models((), model)
    named = named_parameters(model)
    gradients = {name: p.grad for name, p in named if p.grad is not None}
    tensors = {name: p.detach() for name, p in named} | {f"{name}.grad": g for name, g in gradients.items()}
    found: TensorStats = kernels.tensor_stats(list(tensors.values()), names=list(tensors), backend=backend)
    rows = dict(zip(tensors, found, strict=True))
    lines = []
    for name, p in named:
        g = rows.get(f"{name}.grad") if name in gradients else None
        counts = (0, 0, 0, 0) if g is None else (g.num_zeros, g.num_nans, g.num_infs, g.numel)
        lines.append(GradientLine(name, tuple(p.shape), None if g is None else g.norm, rows[name].norm, *counts))
    return GradientTable(lines)
