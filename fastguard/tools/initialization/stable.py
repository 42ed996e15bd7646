"""Weights to begin with: each layer's by what follows it, as `check_initialization` expects them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..bench import require_module
from .check import InitializationReport, check_initialization
from .expected import Weight, find_followers, is_without_values, weights_in, why_not_judged

_EMBEDDING_STD = 0.02


def stable_weight_init(model: nn.Module, *, generator: torch.Generator | None = None) -> InitializationReport:
    """Initialises a new model in place, by what follows each layer, and returns `check_initialization(model)`.

    Weights are normal with mean 0 and the standard deviation that `check_initialization` expects: He's before ReLU and
    its kin, Xavier's before tanh and sigmoid and in attention and recurrent gates, 1/sqrt(fan_in) where nothing
    follows. Hidden-to-hidden weights of RNNs are orthogonal, gate by gate. Embeddings have 0.02, and zeros at their
    `padding_idx`; one tied to an output layer is initialised as that. Biases are 0, weights of norms 1.

    Left as they are: frozen parameters, which may be pretrained, other parameters (positions, scales), parametrized
    weights (weight norm) and running statistics. A branch that is to begin with zeros has to be set to zero afterwards.

    Args:
        model: with values in its parameters: not lazy, not on the meta device.
        generator: where the random numbers come from; of the parameters' device. None: torch's own.

    Returns:
        An `InitializationReport`: `all_ok`, and each layer's rule.

    Raises:
        ValueError: a parameter is lazy or on the meta device; the model has no weights. Nothing is changed then.

    Cost: one write of all parameters and one read; the model is traced with torch.fx. Synchronises.

    Source: He et al. 2015, Glorot and Bengio 2010, Saxe et al. 2014; 0.02: Radford et al. 2018 (GPT).

    >>> import torch, fastguard
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    >>> report = fastguard.tools.stable_weight_init(model)
    >>> report.all_ok, report["0"].rule, report["2"].rule
    (True, 'He: ReLU follows', 'LeCun: no activation follows')
    """
    require_module(model)
    for name, p in model.named_parameters():
        if is_without_values(p):
            raise ValueError(f"`model` must have values in all parameters, got none - at {name!r}: {why_not_judged(p)}")
    if not any(p.requires_grad and p.dim() >= 2 for p in model.parameters()):
        raise ValueError("`model` must have weights that are not frozen, got none")
    with torch.no_grad():
        for module in model.modules():
            _set_vectors(module)
        for weight in weights_in(model, find_followers(model)[0]):
            own = None if weight.module is None else weight.module._parameters.get(weight.attribute)
            if own is not None and own.requires_grad:
                _fill(own, weight, generator)
    return check_initialization(model)


def _set_vectors(module: nn.Module) -> None:
    """Zeros for biases, ones for the weights of norms."""
    is_norm = "norm" in type(module).__name__.lower()
    for name, p in module._parameters.items():
        if p is None or not p.requires_grad:
            continue
        if "bias" in name and (p.dim() < 2 or is_norm):  # a table of biases is a weight
            p.zero_()
        elif is_norm and name == "weight":
            p.fill_(1.0)


def _fill(p: Tensor, weight: Weight, generator: torch.Generator | None) -> None:
    if weight.attribute.startswith("weight_hh") and p.shape[0] % p.shape[1] == 0:
        for gate in p.split(p.shape[1]):
            full = torch.empty(gate.shape, dtype=torch.float32, device=p.device)
            gate.copy_(nn.init.orthogonal_(full, generator=generator))  # half precision has no QR
        return
    is_looked_up = weight.kind == "embedding" and weight.fan_in == 1  # and no more: a tied one is multiplied with
    std = _EMBEDDING_STD if is_looked_up else weight.expected_std
    p.normal_(0.0, std, generator=generator)
    padding = getattr(weight.module, "padding_idx", None)
    if weight.kind == "embedding" and padding is not None:
        p[padding].zero_()
