"""Names for the tensors of an optimizer."""

from __future__ import annotations

import re
import sys
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy

from .errors import write_limit

# What wrappers put into the names of the modules they wrap: DDP and DataParallel, compile, Fabric, FSDP, checkpointing;
# and PEFT, at the beginning.
_WRAPPER_PREFIXES = re.compile(
    r"(^|(?<=\.))(module|_orig_mod|_forward_module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_PEFT_PREFIX = "base_model.model."


def strip_wrappers(name: str) -> str:
    """`name` without the parts that DDP, FSDP, Fabric, PEFT, torch.compile and activation checkpointing add.

    >>> strip_wrappers("module._orig_mod.layers.0.weight"), strip_wrappers("base_model.model.layers.0.lora_A.weight")
    ('layers.0.weight', 'layers.0.lora_A.weight')
    """
    return _WRAPPER_PREFIXES.sub("", name).removeprefix(_PEFT_PREFIX)


def named_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The model's parameters in its order; names without what wrappers add, where these still tell them apart."""
    named = list(model.named_parameters())
    return list(zip(_without_wrappers([name for name, _ in named]), (p for _, p in named), strict=True))


def _without_wrappers(names: list[str]) -> list[str]:
    stripped = list(map(strip_wrappers, names))
    if stripped != names and len(set(stripped)) < len(names):  # a user's own module is called "module"
        return names
    return stripped


class Namer:
    """Finds names: those given, else from the model, the optimizer's named parameters, or `group0.param3`.

    Holds the model and its parameters weakly, and no object for each parameter but its name. The model is asked again
    when it holds other parameters, because FSDP2 and tensor parallelism replace them. Its names outlive it, as those of
    a wrapper made only for `wrap` must.
    """

    def __init__(self, model: torch.nn.Module | None, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._parts = [] if model is None else [weakref.ref(part) for part in model.children()]
        self._model = None if model is None else weakref.ref(model, _when_gone(self))
        self._ids = array("Q")  # of the parameters that the modules of the model hold, shared ones more than once
        self._names: tuple[str | None, ...] = ()  # of these; None from the second time on
        self._others: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}  # what no module of the model holds
        self._given: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self.given: frozenset[str] = frozenset()  # names that were given
        self._ask_model()

    def give(
        self, names: Sequence[str] | Mapping[torch.Tensor, str], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Takes names that go before all others: one for each parameter of `optimizers`, or a dict of some of them.

        Raises:
            ValueError: too few or too many, one twice, or one of a tensor that is not a parameter of the optimizers.
        """
        params = list(parameters_of(optimizers))
        if isinstance(names, Mapping):
            known = {id(p) for p in params}
            pairs = list(names.items())
            if any(id(p) not in known for p, _ in pairs):
                raise ValueError("`names` must map parameters of `optimizer` to names, got a key that is none of them")
        elif isinstance(names, str) or len(names) != len(params):
            what = "a string" if isinstance(names, str) else str(len(names))
            raise ValueError(
                f"`names` must have one name for each of the optimizer's {len(params)} parameters, got {what}"
            )
        else:
            pairs = list(zip(params, names, strict=True))
        stripped = [strip_wrappers(str(name)) for _, name in pairs]
        if len(set(stripped)) != len(stripped):
            raise ValueError("`names` must all be different")
        self._given = {id(p): (weakref.ref(p), name) for (p, _), name in zip(pairs, stripped, strict=True)}
        self.given = frozenset(stripped)

    @property
    def model(self) -> torch.nn.Module | None:
        """The model; None if there was none, or it is gone."""
        return None if self._model is None else self._model()

    def _ask_model(self) -> None:
        model = self.model
        if model is None or (ids := array("Q", map(id, _held_by(model)))) == self._ids:
            return
        found, names = array("Q"), []
        for name, p in model.named_parameters():
            found.append(id(p))
            names.append(name)
        names = _without_wrappers(names)
        self._others = {}
        if found != ids:
            left = dict(zip(found, names, strict=True))
            self._names = tuple(left.pop(i, None) for i in ids)
            if left:
                self._others = _weakly((p for _, p in model.named_parameters()), left)
        else:
            self._names = tuple(names)
        self._ids = ids

    def _outlive_model(self) -> None:
        """The model is going, but not yet all that it holds."""
        names = self._by_id()
        parts = [part for ref in self._parts if (part := ref()) is not None]
        living = [o for ref in self._optimizers if (o := ref()) is not None]
        held = [p for part in parts for p in part.parameters()]
        self._others = {**self._others, **_weakly([*held, *parameters_of(living)], names)}
        self._ids, self._names = array("Q"), ()

    def _by_id(self) -> dict[int, str]:
        return {i: name for i, name in zip(self._ids, self._names) if name is not None}

    def known(self) -> Iterator[tuple[torch.Tensor, str]]:
        """The model's parameters with their names, in its order; as it last was, where it is gone."""
        self._ask_model()
        model = self.model
        for p, name in zip(() if model is None else _held_by(model), self._names):
            if name is not None:
                yield p, name
        for ref, name in self._others.values():
            if (other := ref()) is not None:
                yield other, name

    def beyond(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[torch.Tensor, str]]:
        """As `known`, without the parameters of `optimizers`."""
        self._ask_model()
        ids = array("Q", map(id, parameters_of(optimizers)))
        if ids == self._ids and not self._others:
            return []
        held = set(ids)
        return [(p, name) for p, name in self.known() if id(p) not in held]

    def of_model(self) -> tuple[str, ...]:
        """Names of the parameters that the modules of the model hold, each once."""
        is_once = None not in self._names
        return cast(tuple[str, ...], self._names if is_once else tuple(filter(None, self._names)))

    @property
    def is_empty(self) -> bool:
        """Whether there is no model, and never was one."""
        return not self._names and not self._others

    def names(self, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[str, ...]:
        """One name a parameter, over all groups of all `optimizers`, in their order."""
        self._ask_model()
        if not self._given and array("Q", map(id, parameters_of(optimizers))) == self._ids:
            return self.of_model()
        known, names = self._by_id(), []
        for k, optimizer in enumerate(optimizers):
            prefix = f"optimizer{k}." if len(optimizers) > 1 else ""
            for g, group in enumerate(optimizer.param_groups):
                own: Sequence[Any] = group.get("param_names") or ()
                for i, p in enumerate(group["params"]):
                    name = _weak_name(self._given, p) or known.get(id(p)) or _weak_name(self._others, p)
                    if name is None:
                        name = strip_wrappers(str(own[i])) if i < len(own) else f"{prefix}group{g}.param{i}"
                    names.append(name)
        return tuple(names)

    def check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raises if the model and the optimizers have no parameter in common, or one of theirs has no shape yet."""
        num_lazy = sum(map(is_lazy, parameters_of(optimizers)))
        if num_lazy:
            raise ValueError(
                f"`optimizer` must have initialized parameters, got {num_lazy} of lazy modules. Run one forward pass "
                "before wrapping it."
            )
        ids = array("Q", () if self._model is None else map(id, parameters_of(optimizers)))
        if ids and not any(i in self._ids or i in self._others or i in self._given for i in ids):
            raise ValueError(
                f"`model` must hold parameters of `optimizer`, got a model with {len(self._by_id())} of which none is "
                f"among the optimizer's {len(ids)}. Make the optimizer from this model's parameters(), after it was "
                "moved or re-created; leave `model` out; or say by `names` what they are called, if they are copies."
            )


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """All parameters of `optimizers`, in their order."""
    return (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])


def _held_by(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """What `model.parameters()` gives, shared parameters more than once: it remembers none of them."""
    return (p for module in model.modules() for p in module._parameters.values() if p is not None)


def _weakly(
    params: Iterable[torch.Tensor], names: Mapping[int, str]
) -> dict[int, tuple[weakref.ref[torch.Tensor], str]]:
    """Those of `params` whose ids have `names`."""
    return {id(p): (weakref.ref(p), names[id(p)]) for p in params if id(p) in names}


def _weak_name(named: Mapping[int, tuple[weakref.ref[torch.Tensor], str]], parameter: torch.Tensor) -> str | None:
    ref, name = named.get(id(parameter), (None, None))
    return name if ref is not None and ref() is parameter else None


def _when_gone(namer: Namer) -> Callable[[object], None]:
    me, is_finalizing = weakref.ref(namer), sys.is_finalizing  # kept here: at exit, globals are gone first

    def call(_: object) -> None:
        namer = me()
        if namer is not None and not is_finalizing():
            namer._outlive_model()

    return call


def check_models(optimizers: Sequence[Any], model: Any) -> None:
    """Raises TypeError if a model stands in an optimizer's place, or `model` is not a model."""
    for kind in (type(one).__name__ for one in optimizers if isinstance(one, torch.nn.Module)):
        remedy = "The two are swapped" if isinstance(model, torch.optim.Optimizer) else "Pass the optimizer first"
        raise TypeError(
            f"`optimizer` must be a torch.optim.Optimizer, got the model {kind}. {remedy}: wrap(optimizer, model)."
        )
    if model is None or isinstance(model, torch.nn.Module):
        return
    remedy = write_limit(model)
    if isinstance(model, torch.optim.Optimizer):
        remedy = "Pass several optimizers as a list: wrap([first, second], model)."
    elif isinstance(model, Iterable):
        remedy = "Pass the model itself, not its parameters: wrap(optimizer, model)."
    raise TypeError(f"`model` must be a torch.nn.Module, got a {type(model).__name__}. {remedy}".rstrip())
