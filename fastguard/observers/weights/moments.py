"""Second moments of Adam and its kin at sampled steps: how large they are, and the steps that they leave."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from ... import kernels
from ...records import TensorStats

# Exactly these classes, whose moments are averages of squares: no average is larger than the largest square.
_KEYS: dict[type, str] = {
    **dict.fromkeys((optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam), "exp_avg_sq"),
    optim.RMSprop: "square_avg",
}


def second_moments(
    optimizer: optim.Optimizer, parameters: Sequence[Tensor], groups: Sequence[Mapping[str, Any]], backend: str
) -> dict[int, dict[str, float]]:
    """For the places of `parameters` that have a second moment, the fields of `WeightStats` that tell of it.

    Those of Adam, AdamW, NAdam, RAdam and RMSprop, not of classes derived from them.

    Cost: one read of the second moments; on an accelerator, one sync.
    """
    key = _KEYS.get(type(optimizer))
    if key is None:
        return {}
    found = {i: state.get(key) for i, p in enumerate(parameters) if (state := optimizer.state.get(p))}
    moments = {i: v for i, v in found.items() if _is_plain(v) and v.shape == parameters[i].shape}
    rows = TensorStats(kernels.run_stats(list(moments.values()), backend)[0])
    steps: dict[int, float] = {}  # of what is on an accelerator, one is asked for, not all
    told = {}
    for i, row in zip(moments, rows, strict=True):
        group, share = groups[i], 1.0
        if key == "exp_avg_sq":
            step = optimizer.state[parameters[i]]["step"]
            taken = float(step) if not isinstance(step, Tensor) or step.is_cpu else steps.get(id(group))
            taken = steps.setdefault(id(group), float(step)) if taken is None else taken
            share = 1.0 - float(group["betas"][1]) ** taken
        is_finite = not row.num_nans and not row.num_infs
        rms = math.sqrt(max(row.mean, 0.0) / share) if is_finite and share > 0.0 else math.inf
        left = rms + float(group["eps"])
        told[i] = {
            "moment_rms": rms,
            "moment_min": row.abs_min_nonzero,
            "moment_max": row.abs_max if is_finite else math.inf,
            "effective_step": float(group["lr"]) / left if left else math.inf,
        }
    return told


def _is_plain(v: Any) -> bool:
    """Whether a state is a dense tensor of numbers; quantised ones are of classes of their own."""
    return type(v) is Tensor and v.layout is torch.strided and v.is_floating_point()
