"""All that an optimizer is made of, as a flat dict that can be compared to the bit.

Parameters, `state` (what belongs to a parameter and what does not), `param_groups`, and attributes, down into
optimizers that it holds, helpers of its own and random number generators. Not among them: gradients, hooks, the guard.
"""

from __future__ import annotations

import functools
import hashlib
import random
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

_ADDRESSES = 1 << 40  # no count is so large
Parts = dict[str, str]
NEW = " (new)"  # behind a path that was not there before

# Set by the guard, beside what is of a class of fastguard's: by it a GradScaler leaves infinities to the guard.
_OURS = "_step_supports_amp_scaling"
_TORCHS_OWN = ("_optimizer_", "_zero_grad_profile_name", "_patch", "_hook_for_profile", "_warned_capturable")
_OPAQUE = (types.ModuleType, types.GeneratorType, weakref.ref, weakref.WeakSet, weakref.WeakKeyDictionary, torch.Stream)
_CALLABLE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """The parameters in the groups of `optimizer`; of the one that it wraps if it has no groups."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        groups = optimizer.optimizer.param_groups
    return [p for group in groups for p in group["params"]]


def parts(optimizer: Any, model: torch.nn.Module) -> Parts:
    """Every part of `optimizer` under a path as in `state[2.weight].exp_avg`, with its value or a digest of it.

    What has no content has no part: looking a parameter up in a `state` that is a defaultdict makes an empty entry.
    """
    names = {where: name for name, p in model.named_parameters() for where in (id(p), p.data_ptr())}
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    for number, p in enumerate(parameters_of(optimizer)):
        if id(p) not in names:
            names[id(p)] = f"copy {number}"
            tensors[f"copy {number}"] = p.detach()
    found = {f"parameters[{name}]": _digest(p) for name, p in tensors.items()}
    found.update(_Walk(names).optimizer("", optimizer))
    return found


def differences(before: Parts, after: Parts) -> list[str]:
    """Paths of what is not the same, in the order of `after`; what has come or gone says so."""
    changed = [path if path in before else path + NEW for path in after if after[path] != before.get(path)]
    return changed + [f"{path} (gone)" for path in before if path not in after]


def _is_ours(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "fastguard"


def _digest(tensor: torch.Tensor) -> str:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None and type(tensor) is not torch.Tensor:
        inner, context = flatten()
        return repr([(name, _digest(getattr(tensor, name))) for name in inner] + [context])
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    content = flat.view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha1(content).hexdigest()[:16]}"


class _Walk:
    """One walk through an optimizer.

    Args:
        names: of the parameters, by id.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._seen: dict[int, str] = {}
        self._alive: list[Any] = []  # what was made on the way: its id must not be given to another

    def optimizer(self, path: str, optimizer: Any) -> Iterator[tuple[str, str]]:
        self._seen[id(optimizer)] = path
        content = {name: value for name, value in vars(optimizer).items() if name != _OURS and not _is_ours(value)}
        state = content.pop("state", None)
        if state is not None:
            yield from self.value(f"{path}state", state)
        yield from self.value(f"{path}param_groups", content.pop("param_groups", None))
        for name, value in content.items():
            if not name.startswith(_TORCHS_OWN):
                yield from self.value(f"{path}{name}", value)

    def key(self, key: Any, number: int) -> str:
        """What a key says, wherever in memory this training's parameters are: their ids and addresses are names."""
        if isinstance(key, torch.Tensor):
            return self._names.get(id(key), f"tensor {number}")
        if isinstance(key, tuple):
            return f"({', '.join(self.key(part, number) for part in key)})"
        if isinstance(key, int) and not isinstance(key, bool):
            return self._names.get(key) or (repr(key) if abs(key) < _ADDRESSES else f"address {number}")
        return repr(key)

    def mapping(self, path: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
        for number, (key, value) in enumerate(values.items()):
            yield from self.value(f"{path}[{self.key(key, number)}]", value)

    def value(self, path: str, value: Any) -> Iterator[tuple[str, str]]:
        if id(value) in self._names:
            yield path, f"parameter {self._names[id(value)]}"
        elif isinstance(value, torch.Tensor):
            yield path, _digest(value)
        elif value is None or isinstance(value, (bool, int, float, complex, str, bytes, range, slice)):
            yield path, f"{type(value).__name__} {value!r}"
        elif isinstance(value, _CALLABLE):
            yield path, getattr(value, "__qualname__", type(value).__name__)
        elif isinstance(value, _OPAQUE):
            yield path, type(value).__name__
        elif id(value) in self._seen:
            yield path, f"as {self._seen[id(value)]}"
        else:
            self._seen[id(value)] = path
            self._alive.append(value)
            yield from self.container(path, value)

    def container(self, path: str, value: Any) -> Iterator[tuple[str, str]]:
        if isinstance(value, torch.optim.Optimizer):
            yield from self.optimizer(f"{path}.", value)
        elif isinstance(value, torch.nn.Module):
            for name, tensor in value.state_dict().items():
                yield f"{path}[{name}]", _digest(tensor)
        elif isinstance(value, Mapping):
            yield from self.mapping(path, value)
        elif isinstance(value, (set, frozenset)):
            yield path, repr(sorted(self.key(item, 0) for item in value))
        elif isinstance(value, functools.partial):
            yield from self.value(path, [value.func, value.args, value.keywords])
        elif isinstance(value, random.Random):
            yield path, _hashed(value.getstate())
        elif isinstance(value, torch.Generator):
            yield path, _digest(value.get_state())
        elif isinstance(value, np.random.Generator):
            yield path, _hashed(value.bit_generator.state)
        elif isinstance(value, (np.ndarray, np.generic)):
            yield path, f"{value.dtype} {value.shape} {hashlib.sha1(np.ascontiguousarray(value)).hexdigest()[:16]}"
        elif isinstance(value, Sequence) or type(value).__module__ == "collections":
            for number, item in enumerate(value):
                yield from self.value(f"{path}[{number}]", item)
        elif type(value).__module__ == "itertools":
            yield path, repr(value)
        elif hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in ("torch", "builtins"):
            for name, item in vars(value).items():
                yield from self.value(f"{path}.{name}", item)
        else:
            yield path, type(value).__qualname__


def _hashed(value: Any) -> str:
    return hashlib.sha1(repr(value).encode()).hexdigest()[:16]
