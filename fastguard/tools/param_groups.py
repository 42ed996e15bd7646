"""Parameter groups: no weight decay for biases and norms, and a learning rate for each depth."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from .._text import listed
from ..names import strip_wrappers
from ..records import values
from .bench import require_module


def param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.01,
    *,
    layer_decay: float | None = None,
    lr_for: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Groups for any torch.optim.Optimizer: `torch.optim.AdamW(fastguard.param_groups(model, 3e-4))`.

    Each group has an absolute `lr` and `weight_decay`, and a `name`. Frozen parameters are left out, and shared ones
    occur once. Biases, norms and other parameters of less than two dimensions get a weight decay of 0.

    Args:
        model: the model with all its parameters; it may be compiled or wrapped in DDP.
        lr: the learning rate, > 0.
        weight_decay: weight decay of the weights, >= 0.
        layer_decay: in (0, 1]: the rate of a layer is lr · layer_decay^(layers above). 0.65 to 0.9 is usual in
            fine-tuning. Layers are, in the order of registration, names up to their first number ("blocks.1"), and
            others between these.
        lr_for: factors by pattern, a parameter name with *, such as `{"embed.*": 0.1, "head.*": 10.0}`; the first match
            counts. A factor of 0 keeps the parameters unchanged.

    Raises:
        ValueError: a rate, decay or factor is out of range, a pattern matches no parameter, or there is nothing to
            train.

    Cost: none per step, except what the optimizer takes for several groups.

    Source: Clark et al. 2020 (ELECTRA) and Bao et al. 2021 (BEiT) for rates by depth, Howard and Ruder 2018 (ULMFiT)
    for discriminative fine-tuning. Deviation: rates are absolute, so that torch's schedulers need no factor to heed.

    >>> import torch, fastguard
    >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    >>> groups = fastguard.param_groups(model, 1e-3, 0.1, layer_decay=0.5, lr_for={"0.*": 0.1})
    >>> for group in groups:
    ...     print(group["name"], len(group["params"]), f"{group['lr']:g}", group["weight_decay"])
    0, 0.* 1 2.5e-05 0.1
    1 1 0.0005 0.1
    1, no decay 1 0.0005 0.0
    2, no decay 2 0.001 0.0
    """
    require_module(model)
    lr = values.positive("lr", lr, "It is that of the last layer.")
    if not 0.0 <= weight_decay < math.inf:
        raise ValueError(f"`weight_decay` must be a finite number >= 0, got {weight_decay!r}")
    if layer_decay is not None and not 0.0 < layer_decay <= 1.0:
        raise ValueError(f"`layer_decay` must be None or in (0, 1], got {layer_decay!r}")
    factors = dict(lr_for or {})
    for pattern, factor in factors.items():
        if not 0.0 <= factor < math.inf:
            raise ValueError(f"`lr_for` must have finite factors >= 0, got {factor!r} - at {pattern!r}")
    named = [(name, p, is_plain) for name, p, is_plain in _parameters(model) if p.requires_grad]
    if not named:
        raise ValueError(f"`model` must have parameters to train, got a {type(model).__name__} without any")
    names = [name for name, _, _ in named]
    places = _by_number(names)
    known = list(dict.fromkeys(places))
    unused = set(factors)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for (name, p, is_plain), place in zip(named, places, strict=True):
        rate = lr if layer_decay is None else lr * layer_decay ** (len(known) - 1 - known.index(place))
        fitting = [one for one in factors if fnmatchcase(name, one)]
        unused.difference_update(fitting)
        pattern = fitting[0] if fitting else ""
        rate *= factors.get(pattern, 1.0)
        is_decayed = not weight_decay or is_plain
        title = [*([place] if layer_decay is not None else []), *([pattern] if pattern else [])] or ["all"]
        label = ", ".join([*title, *([] if is_decayed else ["no decay"])])
        new = {"params": [], "lr": rate, "weight_decay": float(weight_decay) if is_decayed else 0.0, "name": label}
        groups.setdefault((label, rate), new)["params"].append(p)
    if unused:
        raise ValueError(
            f"`lr_for` must fit parameters that are trained, got {listed(sorted(unused))}, which fit none. "
            f"The parameters are: {listed(names, 8)}."
        )
    return list(groups.values())


def _parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Name, parameter and whether weight decay suits it, each parameter once, in the order of registration."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        is_norm = "norm" in type(module).__name__.lower() and not any(True for _ in module.children())
        for name, p in module.named_parameters(recurse=False):
            if id(p) not in seen:
                seen.add(id(p))
                yield strip_wrappers(f"{prefix}.{name}" if prefix else name), p, p.dim() >= 2 and not is_norm


def _by_number(names: Sequence[str]) -> list[str]:
    """The layer of each name: up to its first number; of names without one, what stands side by side is one layer."""
    found: list[str] = []
    is_open = False  # whether the last layer is one of names without a number
    for name in names:
        match = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
        if match is None and is_open:
            found.append(found[-1])
            continue
        is_open = match is None
        module = name.rpartition(".")[0]
        found.append(match[0] if match is not None else name if module in found else module or name)
    return found
