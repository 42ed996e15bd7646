"""Weights and updates at sampled steps: two calls around an optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...kernels.tensors import NATIVE_DTYPES
from ...records import TensorRow, TensorStats, values
from ...records.samples import WeightStats
from ..thinning import strided
from .moments import second_moments
from .updates import Formula, chunked_norm, formula, group_has_formula, suits_formula

EVERY = 100
MIN_BYTES, MAX_SHARE = 1 << 20, 0.01  # what copies may take: the larger of both, the latter of what is copied from


class Sample:
    """What was taken before one step: the weights' statistics, and copies of some of their elements."""

    __slots__ = ("copies", "formulas", "groups", "parameters", "places", "rows", "share")

    def __init__(
        self,
        places: list[int],
        parameters: list[Tensor],
        rows: Sequence[TensorRow],
        groups: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.places = places  # among all parameters of the optimizer, without integers, float8 and meta tensors
        self.parameters = parameters
        self.rows = rows
        self.groups = groups
        self.copies: dict[int, Tensor] = {}
        self.share = 1.0  # of the elements that are copied
        self.formulas: dict[int, dict[str, Any]] = {}


class WeightSampler:
    """Takes statistics of one optimizer's parameters, and of what its steps change them by.

    `before` the step every parameter is read once. `after` it, the second moments of Adam, AdamW, NAdam, RAdam and
    RMSprop are, and updates are told in one of two ways:

    - from the state that the step left, for SGD (not Nesterov's), Adam, AdamW, Adamax, Adagrad without weight decay,
      and RMSprop without weight decay or with momentum, in float32, float64 and complex: nothing is copied. It is what
      the optimizer asked for; below 1e-6 of the weights, float32's rounding swallows part of it, which this does not
      see.
    - for every other optimizer, sparse gradients and half precision, by difference with a copy made before the step.
      Where the parameters take more than `max_bytes`, the same share of the elements of each is copied, evenly spaced,
      and `update_norm` is estimated from these: of 10,000 elements to within 1 %, unless a few hold most of the update.

    Args:
        every: a step whose number it divides is sampled. After a skipped step, which changed nothing and has
            `update_norm` None, the next one is.
        updates: whether to measure updates and second moments; False leaves the statistics of the weights.
        max_bytes: bound on the copies held from before the step until after it; None: 1 MiB, or a hundredth of the
            parameters that they are of if that is more. With 0, `update_norm` is None where no formula gives it.
        backend: as for `fastguard.tensor_stats`.

    Raises:
        ValueError: `every` is not an integer >= 1, or `max_bytes` not one >= 0.

    Cost: nothing at other steps. At a sampled one: one read of the parameters; for updates one read of what the
    formula needs (SGD: gradient or momentum; Adam: both moments; AdamW: weights and both moments), or for copied
    parameters four reads and two writes; and one of the second moments. On an accelerator, two or three syncs.

    >>> import torch
    >>> p = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer, sampler = torch.optim.SGD([p], lr=0.5), WeightSampler(every=1)
    >>> p.grad = torch.tensor([1.0, 0.0])
    >>> sample = sampler.before(optimizer)
    >>> optimizer.step()
    >>> sampler.after(optimizer, sample, names=["w"])[0].update_ratio
    0.1
    """

    def __init__(
        self, every: int = EVERY, *, updates: bool = True, max_bytes: int | None = None, backend: str = "auto"
    ) -> None:
        self.every = values.at_least(1, "every", every, "100 samples every hundredth step.")
        self.updates = bool(updates)
        self.max_bytes = max_bytes
        if max_bytes is not None:
            values.at_least(0, "max_bytes", max_bytes, "0 copies nothing.")
        self.backend = kernels.resolve_backend(backend)
        self._is_owed = False

    def is_due(self, step: int) -> bool:
        """Whether to sample the step of that number. Cost: 0.1 us."""
        return self._is_owed or step % self.every == 0

    def before(self, optimizer: torch.optim.Optimizer) -> Sample:
        """Reads the parameters, and copies those whose update can't be told otherwise. Ahead of the step."""
        every = [(p, group) for group in optimizer.param_groups for p in group["params"]]
        places = [k for k, (p, _) in enumerate(every) if p.dtype in NATIVE_DTYPES and not p.is_meta]
        parameters = [every[k][0] for k in places]
        table, _ = kernels.run_stats([p.detach() for p in parameters], self.backend)
        groups = [every[k][1] for k in places]
        sample = Sample(places, parameters, list(TensorStats(table)), groups)
        if self.updates:
            fitting = {id(group) for group in optimizer.param_groups if group_has_formula(optimizer, group)}
            fits = [id(group) in fitting and suits_formula(p) for p, group in zip(parameters, groups, strict=True)]
            sample.formulas = {i: group for i, group in enumerate(groups) if fits[i]}
            self._copy(sample, [i for i, fit in enumerate(fits) if not fit])
        return sample

    def _copy(self, sample: Sample, indices: list[int]) -> None:
        """Copies the same share of the elements of each of `indices`."""
        size = sum(sample.parameters[i].nbytes for i in indices)
        most = max(MIN_BYTES, int(MAX_SHARE * size)) if self.max_bytes is None else self.max_bytes
        if size and most:
            sample.share = min(1.0, most / size)
            sample.copies = {i: _picked(sample.parameters[i], sample.share).clone() for i in indices}

    def after(
        self,
        optimizer: torch.optim.Optimizer,
        sample: Sample,
        *,
        names: Sequence[str],
        gradient_norms: Mapping[str, float] | None = None,
        skipped: bool = False,
    ) -> tuple[WeightStats, ...]:
        """One `WeightStats` a parameter, in the order of the optimizer's groups. Once the step is taken.

        Args:
            sample: what `before` gave.
            names: one for each parameter of the optimizer.
            gradient_norms: norms of the gradients by name, unscaled and before clipping; a parameter that is not among
                them had no gradient and was left alone. Without it, that is one whose `.grad` is None.
            skipped: the step left everything as it was: no update is measured, and the next step is due.
        """
        self._is_owed = skipped and self.updates
        mine = [names[k] for k in sample.places]
        known = gradient_norms
        if known is None:
            known = {}
            moved = [p.grad is not None for p in sample.parameters]
        else:
            moved = [name in known for name in mine]
        norms: list[float | None] = [None] * len(mine)
        moments: dict[int, dict[str, float]] = {}
        if self.updates and not skipped:
            norms = self._update_norms(optimizer, sample, moved)
            moments = second_moments(optimizer, sample.parameters, sample.groups, self.backend)
        return tuple(
            WeightStats(
                name=name,
                numel=row.numel,
                norm=row.norm,
                std=row.std,
                abs_max=row.abs_max,
                grad_norm=known.get(name),
                update_norm=norm,
                num_nonfinite=row.num_nans + row.num_infs,
                **moments.get(i, {}),
            )
            for i, (name, row, norm) in enumerate(zip(mine, sample.rows, norms, strict=True))
        )

    def _update_norms(
        self, optimizer: torch.optim.Optimizer, sample: Sample, moved: Sequence[bool]
    ) -> list[float | None]:
        norms: list[float | None] = [None] * len(sample.rows)
        multiples: dict[int, Formula] = {}
        waiting: dict[torch.device, list[tuple[int, Tensor]]] = {}
        with torch.no_grad():
            for i, group in sample.formulas.items():
                made = formula(optimizer, group, sample.parameters[i]) if moved[i] else None
                if made is None:
                    norms[i] = None if moved[i] else 0.0
                elif made.update is None:
                    multiples[i] = made
                elif isinstance(norm := chunked_norm(made, self.backend), Tensor):
                    waiting.setdefault(norm.device, []).append((i, norm))
                else:
                    norms[i] = norm
            for i, copy in sample.copies.items():
                copy.sub_(_picked(sample.parameters[i], sample.share))
        for found in waiting.values():
            for (i, _), value in zip(found, torch.stack([norm for _, norm in found]).tolist(), strict=True):
                norms[i] = value
        # Plain multiples and differences in one call.
        tensors = [made.sources[0].detach() for made in multiples.values()] + list(sample.copies.values())
        rows = iter(TensorStats(kernels.run_stats(tensors, self.backend)[0]))
        for (i, made), row in zip(multiples.items(), rows):
            norms[i] = row.norm * abs(float(made.factor))
        for (i, copy), row in zip(sample.copies.items(), rows, strict=True):
            norms[i] = row.norm * math.sqrt(sample.parameters[i].numel() / max(1, copy.numel()))
        sample.copies.clear()
        return norms


def _picked(parameter: Tensor, share: float) -> Tensor:
    return strided(parameter.detach(), int(share * parameter.numel()))
