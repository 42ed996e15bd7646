"""Chooses the modules to watch, their names, and how to judge them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from ...names import PEFT_PREFIX
from ..observer import WRAPPERS
from .families import BLOCK, GELU, RELU, Judgement, is_block, judgement_of, unit_dim_after

Selector: TypeAlias = str | type[nn.Module] | nn.Module | Iterable[Any]

_SILENT = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # never called
_ACTIVATIONS = ("relu", "gelu", "tanh", "sigmoid", "hardtanh", "softmax")
_CALL_MODULES = (nn.Sequential, nn.TransformerEncoder, nn.TransformerDecoder)  # and nothing else


class Target(NamedTuple):
    """Something to watch: the output of `module`, or its input.

    Attributes:
        unit_dim: dimension of its units; None if the shape of the tensor decides.
        of_input: watch the input instead.
        is_quiet: it makes a record only when it is not finite.
    """

    module: Any
    name: str
    judgement: Judgement
    unit_dim: int | None = None
    of_input: bool = False
    is_quiet: bool = False


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
    """Every module of `model` by name, without wrappers (also PEFT's) and their names; "" is the model itself.

    >>> [name for name in names_of(nn.DataParallel(nn.Sequential(nn.ReLU())))]
    ['', '0']
    """
    clean = {"": ""}
    parents: dict[str, nn.Module] = {"": model}
    found: dict[str, nn.Module] = {}
    for raw, module in model.named_modules():
        if raw:
            parent, _, key = raw.rpartition(".")
            above = clean[parent]
            hidden = WRAPPERS.get(type(parents[parent]).__name__) == key
            clean[raw] = above if hidden else f"{above}.{key}" if above else key
            parents[raw] = module
        found[clean[raw]] = module  # the inner module replaces its wrapper
    return {
        name.removeprefix(PEFT_PREFIX) if name.removeprefix(PEFT_PREFIX) not in found else name: module
        for name, module in found.items()
    }


def choose(
    named: dict[str, nn.Module],
    is_default: bool,
    fits: Callable[[Target], bool],
    unit_dim: int | None,
) -> list[Target]:
    """The targets in a model whose modules are `named`.

    Args:
        is_default: some modules make a record only while their output is not finite.

    Raises:
        ValueError: nothing matches; names some modules.
    """
    chosen = list(filter(fits, _infer_units(named, (_default if is_default else _everything)(named), unit_dim)))
    if all(target.is_quiet for target in chosen):
        some = ", ".join(repr(name) for name in list(named)[1:9]) or class_name(named[""])
        raise ValueError(
            "`modules`, `include` and `exclude` must leave at least one module to watch, got none - in a model of "
            f"{len(named)} modules such as {some or class_name(named[''])}. Patterns are searched in these names."
        )
    return chosen


def chosen_by(modules: Selector | None, include: Selector | None, exclude: Selector | None) -> Callable[[Target], bool]:
    """A function that says whether a target matches these; "default" and "all" match everything."""
    is_open = modules is None or (isinstance(modules, str) and modules in ("default", "all"))
    wanted = [] if is_open else [matcher("modules", modules)]
    if include is not None:
        wanted.append(matcher("include", include))
    unwanted = [] if exclude is None else [matcher("exclude", exclude)]
    return lambda target: all(one(target) for one in wanted) and not any(one(target) for one in unwanted)


def _everything(named: dict[str, nn.Module]) -> list[Target]:
    outputs = [
        Target(module, name or class_name(module), judgement_of(module))
        for name, module in named.items()
        if not isinstance(module, _SILENT)
    ]
    return outputs + _hidden(named)


def _default(named: dict[str, nn.Module]) -> list[Target]:
    """Activation functions, attention, norms, blocks, and the whole model; the others to find the origin of a NaN."""
    kept = []
    for target in _everything(named):
        parent = named.get(target.name.rpartition(".")[0])
        if target.judgement.family in (*_ACTIVATIONS, "attention", "norm") or target.of_input:
            kept.append(target)
        elif target.module is named[""] or is_block(target.module, parent):
            kept.append(target._replace(judgement=BLOCK))
        else:
            kept.append(target._replace(judgement=target.judgement._replace(has_units=False), is_quiet=True))
    return kept


def _hidden(named: dict[str, nn.Module]) -> list[Target]:
    """Hidden layers of MLPs whose activation is not a module: the input of the down projection."""
    found = []
    for name, module in named.items():
        parts = dict(module.named_children())
        judgement: Judgement | None = GELU
        if "down_proj" in parts and ("gate_proj" in parts or "gate_up_proj" in parts):
            projection = parts["down_proj"]
        elif {"w1", "w2", "w3"} <= parts.keys():
            projection = parts["w2"]
        elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            projection = module.linear2
            kind = getattr(module.activation, "__name__", None)  # a function; a module is watched on its own
            judgement = {"relu": RELU, "gelu": GELU}.get(kind or "")
        else:
            continue
        if judgement is not None:
            found.append(Target(projection, f"{name}[hidden]" if name else "[hidden]", judgement, -1, of_input=True))
    return found


def _infer_units(named: dict[str, nn.Module], targets: list[Target], unit_dim: int | None) -> list[Target]:
    """The dimension of the units, by the preceding layer in the order of registration."""
    dims: dict[int, int | None] = {}
    last: int | None = None
    for module in named.values():
        own = unit_dim_after(module)
        last = last if own is None else own
        dims[id(module)] = last
    return [t if t.of_input else t._replace(unit_dim=unit_dim or dims[id(t.module)]) for t in targets]


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
    if isinstance(selector, nn.Module) and not isinstance(selector, (nn.ModuleList, nn.Sequential)):
        return lambda target: target.module is selector
    if isinstance(selector, nn.Module):
        inside = set(map(id, selector.modules()))
        return lambda target: id(target.module) in inside
    if isinstance(selector, Iterable):
        matchers = [matcher(argument, one) for one in selector]
        return lambda target: any(matches(target) for matches in matchers)
    raise TypeError(
        f"`{argument}` must be a regular expression, a module type, a module, or several of these, got {selector!r}"
    )
