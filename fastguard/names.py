"""Names for the tensors of an optimizer."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

# What wrappers put into the names of the modules they wrap: DDP and DataParallel, compile, Fabric, FSDP, checkpointing;
# and PEFT, at the beginning.
_WRAPPER_PREFIXES = re.compile(
    r"(^|(?<=\.))(module|_orig_mod|_forward_module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
PEFT_PREFIX = "base_model.model."


def strip_wrappers(name: str) -> str:
    """`name` without the parts that DDP, FSDP, Fabric, PEFT, torch.compile and activation checkpointing add.

    >>> strip_wrappers("module._orig_mod.layers.0.weight"), strip_wrappers("base_model.model.layers.0.lora_A.weight")
    ('layers.0.weight', 'layers.0.lora_A.weight')
    """
    return _WRAPPER_PREFIXES.sub("", name).removeprefix(PEFT_PREFIX)


def named_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The model's parameters in its order; names without what wrappers add, where these still tell them apart."""
    named = list(model.named_parameters())
    stripped = {strip_wrappers(name): p for name, p in named}
    return list(stripped.items()) if len(stripped) == len(named) else named  # a user's own module is called "module"


class Namer:
    """Finds names: those given, else from the model, the optimizer's named parameters, or `group0.param3`.

    Holds the model and its parameters weakly. The model is asked again each time, because FSDP2 and tensor parallelism
    replace parameters; what it said last is kept for when it is gone, as a wrapper made only for `wrap` is.

    Attributes:
        given: names that were given.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._given: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self.given: frozenset[str] = frozenset()
        self._ask_model()

    def give(
        self, names: Sequence[str] | Mapping[torch.Tensor, str], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Takes names that go before all others: one for each parameter of `optimizers`, or a dict of some of them.

        Raises:
            ValueError: too few or too many, one twice, or one of a tensor that is not a parameter of the optimizers.
        """
        params = [p for o in optimizers for group in o.param_groups for p in group["params"]]
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
        if model is None:
            return
        self._known = {id(p): (weakref.ref(p), name) for name, p in named_parameters(model)}

    def known(self) -> list[tuple[torch.Tensor, str]]:
        """The model's parameters with their names, in its order; as it last was, where it is gone."""
        self._ask_model()
        return [(p, name) for ref, name in self._known.values() if (p := ref()) is not None]

    def _name_of(self, parameter: torch.Tensor) -> str | None:
        """The name that was given to `parameter`, or that the model has for it."""
        for named in (self._given, self._known):
            ref, name = named.get(id(parameter), (None, None))
            if ref is not None and ref() is parameter:
                return name
        return None

    def names(self, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[str, ...]:
        """One name a parameter, over all groups of all `optimizers`, in their order."""
        self._ask_model()
        names = []
        for k, optimizer in enumerate(optimizers):
            prefix = f"optimizer{k}." if len(optimizers) > 1 else ""
            for g, group in enumerate(optimizer.param_groups):
                given: Sequence[Any] = group.get("param_names") or ()
                for i, p in enumerate(group["params"]):
                    own = strip_wrappers(str(given[i])) if i < len(given) else f"{prefix}group{g}.param{i}"
                    names.append(self._name_of(p) or own)
        return tuple(names)

    def check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raises if the model and the optimizers have no parameter in common."""
        params = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        if self._model is not None and params and not any(self._name_of(p) for p in params):
            raise ValueError(
                f"`model` must hold parameters of `optimizer`, got a model with {len(self._known)} of which none is "
                f"among the optimizer's {len(params)}. Make the optimizer from this model's parameters(), after it was "
                "moved or re-created; leave `model` out; or say by `names` what they are called, if they are copies."
            )
