"""Facts about a model and its optimizers that gradients do not show. See `TrainingHistory.note_model`."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.nn.utils import parametrize

from .. import kernels
from ..names import Namer, strip_wrappers
from ..records import values

_is_lazy = torch.nn.parameter.is_lazy
_MAX_GROUPS = 64  # with their settings in the facts
_MAX_KINDS = 256  # of modules
_NUMBERS = ("lr", "eps", "momentum", "alpha", "rho", "dampening", "weight_decay")
_SWITCHES = ("nesterov", "amsgrad", "maximize")
_LOOKED_UP = (torch.nn.Embedding, torch.nn.EmbeddingBag)  # whose rows are not summed: no fan-in
# Where else a weight has three dimensions, the first is as a rule the number of matrices, as of experts.
_CONVOLVING = (torch.nn.modules.conv._ConvNd, torch.nn.utils.parametrize.ParametrizationList)


class ModelFacts:
    """Facts about the model, held weakly, and the optimizers of one guard; empty without a model.

    Cost: one read of the weights when the guard is made; 0.3 us a parameter each time the rules are checked.
    """

    def __init__(
        self, model: torch.nn.Module | None, optimizers: Sequence[torch.optim.Optimizer], namer: Namer, backend: str
    ) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._namer = namer
        self._backend = backend
        self._settings: list[dict[str, Any]] = []
        params = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        self._dtypes = _dtypes(params)
        self._devices = {p.device for p in params}  # others may be out of the backend's reach

    def at_first(self) -> dict[str, Any]:
        """The facts when the guard is made. Cost: one read of the model's weights; on a GPU one sync."""
        model = None if self._model is None else self._model()
        if model is None:
            return {"dtypes": self._dtypes}
        others = (m for m in model.modules() if not isinstance(m, _CONVOLVING))
        own = ((m, p) for m in others for p in m._parameters.values() if p is not None)
        left_out = {id(p) for m, p in own if isinstance(m, _LOOKED_UP) or (not _is_lazy(p) and p.dim() == 3)}
        # `weight_norm` keeps the norms of the rows of `weight_v` as `weight_g`, which is not a weight matrix.
        sizes = {f"{name[:-1]}g" for _, name in self._namer.known() if name.endswith("_v")}
        named = ((name, p) for p, name in self._namer.known() if p.device in self._devices and id(p) not in left_out)
        weights = [(name, p) for name, p in named if name not in sizes and _is_matrix(name, p)]
        rows = kernels.tensor_stats([p.detach() for _, p in weights], backend=self._backend)
        spread = {
            name: (row.std, math.sqrt(2.0 * p.shape[0] / p.numel()))
            for (name, p), row in zip(weights, rows, strict=True)
            if row.is_finite
        }
        dropout = {
            strip_wrappers(name): float(m.p)
            for name, m in model.named_modules()
            if isinstance(m, torch.nn.modules.dropout._DropoutNd)
        }
        return {
            "names": self._namer.of_model(),
            "initialization": spread,
            "dropout": dropout,
            "module_kinds": dict(Counter(map(kind_of, leaves_of(model))).most_common(_MAX_KINDS)),
            "dtypes": _dtypes(p for p, _ in self._namer.known()) or self._dtypes,
        }

    def now(
        self, optimizers: Sequence[torch.optim.Optimizer], elsewhere: Callable[[], Collection[int]] = tuple
    ) -> dict[str, Any]:
        """Facts that may change during a run; `elsewhere` returns the ids of parameters of other guards. No sync."""
        facts: dict[str, Any] = {"decay_per_step": max((_decay(o) for o in optimizers), default=0.0)}
        facts.update(_schedule(optimizers))
        found = [_settings(o, group) for o in optimizers for group in o.param_groups][:_MAX_GROUPS]
        if [{**one, "lr": 0.0} for one in found] != [{**one, "lr": 0.0} for one in self._settings]:
            self._settings = found  # with the learning rates at the last change of another setting
        facts["optimizer_settings"] = self._settings
        still = _not_moving(optimizers)
        known = {id(p): name for p, name in self._namer.known()} if still else {}
        facts["zero_lr"] = [known.get(i, "a parameter without a name") for i in still]
        if not self._namer.is_empty:
            left = [(id(p), n) for p, n in self._namer.beyond(optimizers) if p.requires_grad]
            others = elsewhere() if left else ()
            facts["not_in_optimizer"] = [n for i, n in left if i not in others and n not in self._namer.given]
            facts["without_gradient"] = [n for p, n in self._namer.known() if not p.requires_grad]
        return facts


def leaves_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules without children, apart from parametrizations of their weights."""
    reparametrising: set[int] = set()
    found = []
    for module in model.modules():
        if id(module) in reparametrising:
            continue
        children = dict(module.named_children())
        if parametrize.is_parametrized(module):
            reparametrising.update(map(id, children.pop("parametrizations").modules()))
        if not children:
            found.append(module)
    return found


def kind_of(module: torch.nn.Module) -> str:
    """The name of a module's class, before it was scripted or parametrized."""
    if isinstance(module, torch.jit.ScriptModule):
        return str(getattr(module, "original_name", "ScriptModule"))
    return parametrize.type_before_parametrizations(module).__name__


def _dtypes(params: Iterable[torch.Tensor]) -> list[str]:
    return list(dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in params))


def _settings(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Kind and settings of one param group, without those that it does not have."""
    found: dict[str, Any] = {"kind": type(optimizer).__name__}
    for name in _NUMBERS:
        value = _number(group.get(name))
        if value is not None:
            found[name] = value
    betas = group.get("betas")
    if isinstance(betas, (tuple, list)):
        found["betas"] = [beta for beta in map(_number, betas) if beta is not None]
    found.update((name, group[name]) for name in _SWITCHES if isinstance(group.get(name), bool))
    found["num_parameters"] = sum(0 if _is_lazy(p) else p.numel() for p in group["params"])
    return found


def _is_matrix(name: str, p: torch.Tensor) -> bool:
    if "weight" not in name.rpartition(".")[2]:  # positions, tokens and other tables have no fan-in
        return False
    is_readable = not p.is_meta and not _is_lazy(p)
    return is_readable and p.dim() >= 2 and p.is_floating_point() and p.numel() >= 16 and p.layout is torch.strided


def _decay(optimizer: torch.optim.Optimizer) -> float:
    """The largest share by which a step of `optimizer` shrinks a parameter for its size alone; 0.0 where not known."""
    is_plain = isinstance(optimizer, (torch.optim.SGD, torch.optim.AdamW))
    groups = [group for group in optimizer.param_groups if is_plain or group.get("decoupled_weight_decay")]
    products = ((_number(group.get("lr")) or 0.0) * (_number(group.get("weight_decay")) or 0.0) for group in groups)
    return max((0.0, *products))


def _number(value: Any) -> float | None:
    """A setting as a number; None for anything else, and for a tensor on an accelerator, which would sync."""
    if isinstance(value, torch.Tensor) and not value.is_cpu:
        return None
    try:
        return values.real(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _not_moving(optimizers: Sequence[torch.optim.Optimizer]) -> list[int]:
    """Parameters (ids) whose learning rate is 0 while that of others is not."""
    groups = [(_number(g["lr"]) == 0.0, g["params"]) for o in optimizers for g in o.param_groups if "lr" in g]
    if all(is_still for is_still, _ in groups):
        return []
    return [id(p) for is_still, params in groups if is_still for p in params]


def _schedule(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Whether torch's scheduler was made: it leaves its mark on `step`; any leaves in the groups where it started."""
    marked = [o for o in optimizers if hasattr(o.step, "_wrapped_by_lr_sched")]
    groups = [group for o in marked or optimizers for group in o.param_groups[:1]]
    initial = next((_number(group["initial_lr"]) for group in groups if "initial_lr" in group), None)
    return {"has_scheduler": bool(marked), **({} if initial is None else {"initial_lr": initial})}
