"""Chooses the modules to watch, their names, and how to judge them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from ...names import strip_wrappers
from .families import BLOCK, GELU, RELU, Judgement, is_block, judgement_of, unit_dim_after

Selector: TypeAlias = str | type[nn.Module] | nn.Module | Iterable[Any]

_SILENT = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # never called
_ACTIVATIONS = ("relu", "gelu", "tanh", "sigmoid", "hardtanh", "softmax")
_CALL_MODULES = (nn.Sequential, nn.TransformerEncoder, nn.TransformerDecoder)  # and nothing else


class Target(NamedTuple):
    """Something to watch: the output of `module`, or its input."""

    module: Any
    name: str
    judgement: Judgement
    unit_dim: int | None = None  # dimension of its units; None if the shape of the tensor decides
    of_input: bool = False  # watch the input instead
    is_quiet: bool = False  # it makes a record only when it is not finite


def class_name(module: nn.Module) -> str:
    """The name of the module's class, before `fully_shard` derived one from it."""
    kind = type(module)
    bases = [base.__name__ for base in kind.__bases__]
    return next(name for name in bases if name != "FSDPModule") if "FSDPModule" in bases else kind.__name__


def is_never_caller(module: nn.Module) -> bool:
    """Whether its own `forward` never computes attention: containers, and torch's layers without children."""
    is_layer = not module._modules and type(module).__module__.startswith("torch.nn.")
    return is_layer or isinstance(module, _SILENT) or type(module) in _CALL_MODULES


def names_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of `model` by name, without wrappers and their names; "" is the model itself."""
    return {strip_wrappers(f"{name}.").rstrip("."): module for name, module in model.named_modules()}


def choose(
    named: dict[str, nn.Module], is_default: bool, fits: Callable[[Target], bool], unit_dim: int | None
) -> list[Target]:
    """The targets in a model whose modules are `named`; a ValueError if nothing matches.

    With `is_default`, all but activation functions, attention, norms, blocks and the whole model are quiet.
    """
    found: list[Target] = []
    dim: int | None = None  # of the units, by the preceding layer in the order of registration
    for name, module in named.items():
        dim = unit_dim_after(module) or dim
        if isinstance(module, _SILENT):
            continue
        judgement, is_quiet = judgement_of(module), False
        if is_default and judgement.family not in (*_ACTIVATIONS, "attention", "norm"):
            is_quiet = bool(name) and not is_block(module, named.get(name.rpartition(".")[0]))
            judgement = judgement._replace(has_units=False) if is_quiet else BLOCK
        found.append(Target(module, name or class_name(module), judgement, unit_dim or dim, is_quiet=is_quiet))
    for name, module in named.items():
        projection, hidden = _hidden(module)
        if hidden is not None:
            found.append(Target(projection, f"{name}[hidden]", hidden, -1, of_input=True))
    chosen = list(filter(fits, found))
    if all(target.is_quiet for target in chosen):
        some = ", ".join(repr(name) for name in list(named)[1:9]) or class_name(named[""])
        raise ValueError(
            "`modules`, `include` and `exclude` must leave at least one module to watch, got none - in a model of "
            f"{len(named)} modules such as {some}. Patterns are searched in these names."
        )
    return chosen


def _hidden(module: nn.Module) -> tuple[nn.Module | None, Judgement | None]:
    """Of an MLP whose activation is not a module: the down projection, whose input is the hidden layer."""
    parts = dict(module.named_children())
    if "down_proj" in parts and ("gate_proj" in parts or "gate_up_proj" in parts):
        return parts["down_proj"], GELU
    if {"w1", "w2", "w3"} <= parts.keys():
        return parts["w2"], GELU
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        kind = getattr(module.activation, "__name__", "")  # a function; a module is watched on its own
        return module.linear2, {"relu": RELU, "gelu": GELU}.get(kind)
    return None, None


def chosen_by(modules: Selector | None, include: Selector | None, exclude: Selector | None) -> Callable[[Target], bool]:
    """A function that says whether a target matches these; "default" and "all" match everything."""
    is_open = modules is None or (isinstance(modules, str) and modules in ("default", "all"))
    wanted = [] if is_open else [matcher("modules", modules)]
    if include is not None:
        wanted.append(matcher("include", include))
    unwanted = [] if exclude is None else [matcher("exclude", exclude)]
    return lambda target: all(one(target) for one in wanted) and not any(one(target) for one in unwanted)


def matcher(argument: str, selector: Any) -> Callable[[Target], bool]:
    """A function that says whether a target matches `selector`, the value of `argument`."""
    if isinstance(selector, str):
        try:
            pattern = re.compile(selector)
        except re.error as error:
            raise ValueError(f"`{argument}` must be a regular expression, got {selector!r}: {error}") from None
        return lambda target: pattern.search(target.name) is not None
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        return lambda target: isinstance(target.module, selector)
    if isinstance(selector, nn.Module):
        is_list = isinstance(selector, (nn.ModuleList, nn.Sequential))
        inside = set(map(id, selector.modules() if is_list else (selector,)))
        return lambda target: id(target.module) in inside
    if isinstance(selector, Iterable):
        matchers = [matcher(argument, one) for one in selector]
        return lambda target: any(matches(target) for matches in matchers)
    raise TypeError(
        f"`{argument}` must be a regular expression, a module type, a module, or several of these, got {selector!r}"
    )
