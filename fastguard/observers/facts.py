"""Facts about a model and its optimizers that gradients do not show. See `TrainingHistory.note_model`."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.utils import parametrize

from .. import _env, kernels
from ..names import Namer, strip_wrappers
from ..records import values
from ..records.running import quantiles
from .loss_gradient import facts_of_loss, parameters_of_loss
from .resources import ResourceUse
from .sketches import guarded_parameters

_is_lazy = torch.nn.parameter.is_lazy
_MAX_GROUPS = 64  # with their settings in the facts
_MAX_KINDS = 256  # of modules
_NUMBERS = ("lr", "eps", "momentum", "alpha", "rho", "dampening", "weight_decay")
_SWITCHES = ("nesterov", "amsgrad", "maximize")
_LOOKED_UP = (torch.nn.Embedding, torch.nn.EmbeddingBag)  # whose rows are not summed: no fan-in
# Where else a weight has three dimensions, the first is as a rule the number of matrices, as of experts.
_CONVOLVING = (torch.nn.modules.conv._ConvNd, torch.nn.utils.parametrize.ParametrizationList)
_FIRST_NORMS = 100  # step at which the weights are read again
_LATE = 20  # steps after which every optimizer has stepped
_ALIVE: weakref.WeakSet[ModelFacts] = weakref.WeakSet()


class ModelFacts:
    """Records facts about model, optimizers and loss in the history of one guard. Failures are recorded, never raised.

    Cost: one read of the weights when the guard is made; 0.3 us a parameter each time the rules are checked.
    """

    def __init__(
        self,
        run: Any,
        ledger: Any,
        observers: Any,
        model: torch.nn.Module | None,
        namer: Namer,
        objective: str | None,
    ) -> None:
        self._run, self._ledger, self._observers = run, ledger, observers
        self._namer, self._objective, self._resources = namer, objective, ResourceUse()
        self._settings: list[dict[str, Any]] = []
        self._foreign: dict[int, tuple[weakref.ref[Any], int]] = {}  # parameters of the loss that are not the model's
        self._loss: int | None = None  # the number of the loss's operation
        self._first_norms: dict[str, float] = {}
        self._next_norms = _FIRST_NORMS
        with run.failures.kept("model facts", "The rules know nothing about the model."):
            ledger.history.note_model(**self.at_first(model))
            self._first_norms = {} if model is None else self._norms()
        self.record()
        _ALIVE.add(self)

    def at_first(self, model: torch.nn.Module | None) -> dict[str, Any]:
        """The facts when the guard is made. Cost: one read of the model's weights; on a GPU one sync."""
        params = self._run.params()
        dtypes, devices = _dtypes(params), {p.device for p in params}  # others may be out of the backend's reach
        if model is None:
            return {"dtypes": dtypes}
        others = (m for m in model.modules() if not isinstance(m, _CONVOLVING))
        own = ((m, p) for m in others for p in m._parameters.values() if p is not None)
        left_out = {id(p) for m, p in own if isinstance(m, _LOOKED_UP) or (not _is_lazy(p) and p.dim() == 3)}
        # `weight_norm` keeps the norms of the rows of `weight_v` as `weight_g`, which is not a weight matrix.
        sizes = {f"{name[:-1]}g" for _, name in self._namer.known() if name.endswith("_v")}
        named = ((name, p) for p, name in self._namer.known() if p.device in devices and id(p) not in left_out)
        weights = [(name, p) for name, p in named if name not in sizes and _is_matrix(name, p)]
        rows = kernels.tensor_stats([p.detach() for _, p in weights], backend=self._run.backend)
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
            "dtypes": _dtypes(p for p, _ in self._namer.known()) or dtypes,
        }

    def _norms(self) -> dict[str, float]:
        """The norms of the weight matrices, embeddings among them. Cost: one read of them; on a GPU one sync."""
        devices = {p.device for p in self._run.params()}  # others may be out of the backend's reach
        named = [(name, p.detach()) for p, name in self._namer.known() if p.device in devices and _is_plain_matrix(p)]
        rows = kernels.tensor_stats([p for _, p in named], backend=self._run.backend)
        return {name: row.norm for (name, _), row in zip(named, rows, strict=True)}

    def record(self, *, is_over: bool = False) -> None:
        """Records the facts as they are now. Reads the weights at steps that double, and when the run `is_over`."""
        run, ledger = self._run, self._ledger
        optimizers = run.living_optimizers()
        if self._first_norms and run.step and (is_over or run.step >= self._next_norms):
            self._next_norms = 2 * run.step
            with run.failures.kept("model facts", "How the weights have grown is not known."):
                first = self._first_norms
                grown = [norm / first[name] for name, norm in self._norms().items() if first.get(name)]
                grown = [ratio for ratio in grown if math.isfinite(ratio)]
                ledger.history.note_model(weight_growth=quantiles(grown, (0.5,))[0] if grown else None)
        with run.failures.kept("model facts", "The rules may not know the settings of optimizer and model."):
            facts = self.now(optimizers) if optimizers else {}
            limit = None if run.clip is None else run.clip.limit
            over, before = run.ranks, ledger.history.model.num_ranks
            if over is not None and over.is_alone:
                over = None
            facts |= {
                **self._observers.facts(),
                "resources": self._resources.facts(run.step) or None,
                "objective": self._objective,
                "loss_ops_beside": sorted(
                    {op for one in _ALIVE if one is not self for op in one._ledger.history.model.loss_ops}
                ),
                "clip_limit": limit if isinstance(limit, (int, float)) else None,
                "clip_policy": "" if run.policy is None else repr(run.policy)[:200],
                "has_scaler": run.has_scaler if run.step else None,
                "num_ranks": over.num_ranks if over is not None else before and 1,  # there were more before a resume
                "num_restarts": _env.num_restarts() or None,
            }
            ledger.history.note_model(**facts)
            # What no step changes is not another network's, as in a game, unless it looks like a copy of the model.
            learns = ledger.history.norm_max > 0.0
            own = {p.shape for p, _ in self._namer.known() if learns}
            known = [(ref(), version) for ref, version in self._foreign.values() if run.step >= _LATE]
            still = [p for p, version in known if p is not None and p.grad is not None and p._version == version]
            if any(p.shape not in own for p in still):
                left = len(self._foreign) - len(still)
                ledger.history.note_model(num_untrained=len(still), num_foreign_parameters=left)

    def now(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """Facts that may change during a run. No sync."""
        facts: dict[str, Any] = {"decay_per_step": max((_decay(o) for o in optimizers), default=0.0)}
        # torch's scheduler leaves its mark on `step`; any leaves in the groups where it started.
        marked = [o for o in optimizers if hasattr(o.step, "_wrapped_by_lr_sched")]
        firsts = [group for o in marked or optimizers for group in o.param_groups[:1] if "initial_lr" in group]
        facts.update(has_scheduler=bool(marked), initial_lr=_number(firsts[0]["initial_lr"]) if firsts else None)
        found = [_settings(o, group) for o in optimizers for group in o.param_groups][:_MAX_GROUPS]
        if [{**one, "lr": 0.0} for one in found] != [{**one, "lr": 0.0} for one in self._settings]:
            self._settings = found  # with the learning rates at the last change of another setting
        facts["optimizer_settings"] = self._settings
        groups = [(_number(g["lr"]) == 0.0, g["params"]) for o in optimizers for g in o.param_groups if "lr" in g]
        is_mixed = len({is_still for is_still, _ in groups}) > 1
        still = [id(p) for is_still, params in groups for p in params if is_still and is_mixed]
        known = {id(p): name for p, name in self._namer.known()} if still else {}
        facts["zero_lr"] = [known.get(i, "a parameter without a name") for i in still]
        if self._namer.model is not None:  # when it is gone, its parameters are, too
            left = [(id(p), n) for p, n in self._namer.beyond(optimizers) if p.requires_grad]
            others = guarded_parameters() if left else ()
            facts["not_in_optimizer"] = [n for i, n in left if i not in others and n not in self._namer.given]
            facts["without_gradient"] = [n for p, n in self._namer.known() if not p.requires_grad]
        return facts

    def record_loss_graph(self, loss: Any) -> None:
        """Records what the autograd graph of the first loss says about it, also for guards whose models are in it."""
        with self._run.failures.kept("model facts", "The rules do not know what loss it is."):
            known = {id(p) for p, _ in self._namer.known()}.union(map(id, self._run.params()))
            self._ledger.history.note_model(**facts_of_loss(loss, known))
            self._foreign = {number: ref for number, ref in parameters_of_loss(loss).items() if number not in known}
            node = getattr(loss, "grad_fn", None)
            self._loss = None if node is None else node._sequence_nr()
            for other in [one for one in _ALIVE if one is not self]:
                is_shared = other._loss == self._loss is not None
                self._compare(other, is_shared)
                other._compare(self, is_shared)

    def _compare(self, other: ModelFacts, is_shared: bool) -> None:
        """Parameters of `other` in this loss are as the model's own if both minimise it, and else an adversary's."""
        params = set(map(id, other._run.params())) if self._foreign else set()
        met = {number for number, (ref, _) in self._foreign.items() if number in params and ref() is not None}
        history = (self if is_shared else other)._ledger.history
        if is_shared and met:
            self._foreign = {number: ref for number, ref in self._foreign.items() if number not in met}
            history.note_model(num_foreign_parameters=len(self._foreign))
        elif len(met) > (history.model.num_foreign_parameters or 0):
            history.note_model(num_foreign_parameters=len(met))
        if met and not is_shared:
            self._ledger.history.note_model(foreign_loss_ops=other._ledger.history.model.loss_ops[:1])


def leaves_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules without children, apart from parametrizations of their weights."""
    changed = [module.parametrizations for module in model.modules() if parametrize.is_parametrized(module)]
    of_weights = {id(part) for one in changed for part in one.modules()}  # type: ignore[union-attr]
    others = [module for module in model.modules() if id(module) not in of_weights]
    return [module for module in others if of_weights.issuperset(map(id, module.children()))]


def kind_of(module: torch.nn.Module) -> str:
    """The name of a module's class, before it was scripted or parametrized, or sharded by `fully_shard`."""
    if isinstance(module, torch.jit.ScriptModule):
        return str(getattr(module, "original_name", "ScriptModule"))
    kind = parametrize.type_before_parametrizations(module)
    bases = [base.__name__ for base in kind.__bases__]
    return next(name for name in bases if name != "FSDPModule") if "FSDPModule" in bases else kind.__name__


def _dtypes(params: Iterable[torch.Tensor]) -> list[str]:
    return list(dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in params))


def _settings(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Kind and settings of one param group, without those that it does not have."""
    found: dict[str, Any] = {"kind": type(optimizer).__name__}
    found.update((name, value) for name in _NUMBERS if (value := _number(group.get(name))) is not None)
    betas = group.get("betas")
    if isinstance(betas, (tuple, list)):
        found["betas"] = [beta for beta in map(_number, betas) if beta is not None]
    found.update((name, group[name]) for name in _SWITCHES if isinstance(group.get(name), bool))
    found["num_parameters"] = sum(0 if _is_lazy(p) else p.numel() for p in group["params"])
    return found


def _is_matrix(name: str, p: torch.Tensor) -> bool:
    return "weight" in name.rpartition(".")[2] and _is_plain_matrix(p)  # positions, tokens, other tables: no fan-in


def _is_plain_matrix(p: torch.Tensor) -> bool:
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
