"""The packages, and how those of their classes are made that are not made of parameters and a learning rate.

Versions are pinned in requirements.txt, beside this file.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .training import NUM_STEPS, Way

REQUIREMENTS = Path(__file__).with_name("requirements.txt")

Make = Callable[[Any, torch.nn.Module], Any]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is odd about a class.

    Args:
        make: given the class and the model; None: `plainly`.
        arguments: for `plainly`.
        closure, graph, backward, named, train, model: as in `Way`.
        group: it wants a process group of torch.distributed; there is one of one process then.
        unusable: why it is not tried at all.
        note: what the table shall say of it.
    """

    make: Make | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    closure: Any = None
    graph: bool = False
    backward: Any = None
    named: bool = True
    train: bool = True
    model: Any = None
    group: bool = False
    unusable: str | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Package:
    """A package of optimizers.

    Args:
        name: on PyPI.
        roots: modules below which its classes are.
        bare: packages whose `__init__` is not run, since it wants what the optimizers do not need.
        eager: run with torch.compile off.
        width: of the model.
        recipes: by a class's name, or its module's last part and its name.
    """

    name: str
    roots: tuple[str, ...]
    bare: tuple[str, ...] = ()
    eager: bool = False
    width: int = 16
    recipes: Mapping[str, Recipe] = dataclasses.field(default_factory=dict)

    def recipe(self, cls: type) -> Recipe:
        """The recipe for a class of this package; an empty one if it needs none."""
        short = f"{cls.__module__.split('.')[-1]}.{cls.__qualname__}"
        return self.recipes.get(short) or self.recipes.get(cls.__qualname__) or Recipe()

    def way(self, cls: type) -> Way:
        """How a class of this package is made and stepped."""
        r = self.recipe(cls)
        make = functools.partial(r.make, cls) if r.make else functools.partial(plainly, cls, **r.arguments)
        closure = r.closure or _closure_of(cls)
        return Way(make, closure, r.graph, r.backward, r.named, r.train, self.width, r.model)


def _closure_of(cls: Any) -> str | None:
    """A closure that `step` cannot do without is passed."""
    closure = inspect.signature(inspect.unwrap(cls.step)).parameters.get("closure")
    return "step" if closure is not None and closure.default is closure.empty else None


def plainly(cls: Any, model: torch.nn.Module, **arguments: Any) -> Any:
    """An optimizer with the settings that its author chose; 0.01 where the learning rate has none."""
    wanted = inspect.signature(cls.__init__).parameters
    given: dict[str, Any] = {}
    if "model" in wanted:
        given["model"] = model
    if "named_parameters" in wanted:
        given["named_parameters"] = list(model.named_parameters())
    if "params" in wanted:
        given["params"] = list(model.parameters())
    for name in ("optimizer", "base_optimizer"):
        if name in wanted and wanted[name].default is inspect.Parameter.empty:
            adamw: Any = torch.optim.AdamW
            given[name] = adamw if "params" in wanted else adamw(model.parameters(), lr=1e-3)
    if "lr" in wanted and wanted["lr"].default is inspect.Parameter.empty:
        given["lr"] = 1e-2
    return cls(**{**given, **arguments})


def _matrices(cls: Any, model: torch.nn.Module) -> Any:
    return cls([p for p in model.parameters() if p.dim() == 2])


def _muon_groups(cls: Any, model: torch.nn.Module) -> Any:
    params = list(model.parameters())
    return cls(
        [
            {"params": [p for p in params if p.dim() == 2], "use_muon": True},
            {"params": [p for p in params if p.dim() != 2], "use_muon": False},
        ]
    )


def _split(cls: Any, model: torch.nn.Module) -> Any:
    import heavyball

    params = list(model.parameters())
    return cls(
        [
            {"params": [p for p in params if p.dim() == 2], "optimizer": heavyball.Muon, "lr": 0.02},
            {"params": [p for p in params if p.dim() != 2], "optimizer": heavyball.AdamW, "lr": 0.001},
        ]
    )


class _Looked(torch.nn.Module):
    """Rows of a table, chosen by the inputs: its gradient is sparse."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(width, width, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.table(inputs.abs().argmax(1))


_AFTER = Recipe(closure="after")
_GRAPH = Recipe(graph=True)
_GROUP = Recipe(group=True)

PACKAGES = (
    Package("adabelief-pytorch", ("adabelief_pytorch",)),
    Package("adam-mini", ("adam_mini",), recipes={"Adam_mini": Recipe(arguments={"dim": 16, "n_heads": 4})}),
    Package("adan-pytorch", ("adan_pytorch",)),
    Package("apollo-torch", ("apollo_torch",)),
    Package(
        "bitsandbytes",
        ("bitsandbytes.optim",),
        width=64,
        recipes={
            name + bits: Recipe(arguments={"momentum": 0.9})
            for name in ("LARS", "PytorchLARS", "SGD")
            for bits in ("", "8bit", "32bit")
        },
    ),
    Package("came-pytorch", ("came_pytorch",), recipes={"CAME": Recipe(arguments={"lr": 1e-3})}),
    Package("dadaptation", ("dadaptation",)),
    Package("galore-torch", ("galore_torch",)),
    Package("grokadamw", ("grokadamw",)),
    Package(
        "heavyball",
        ("heavyball",),
        eager=True,
        recipes={"SplitOpt": Recipe(_split), "SAMWrapper": Recipe(closure="step", train=False)},
    ),
    Package("kron-torch", ("kron_torch",), eager=True),
    Package("lion-pytorch", ("lion_pytorch",)),
    Package("lomo-optim", ("lomo_optim",)),
    Package("madgrad", ("madgrad",)),
    Package(
        "muon-optimizer",
        ("muon",),
        recipes={
            "Muon": Recipe(_matrices, group=True),
            "MuonWithAuxAdam": Recipe(_muon_groups, group=True),
            "SingleDeviceMuon": Recipe(_matrices),
            "SingleDeviceMuonWithAuxAdam": Recipe(_muon_groups),
        },
    ),
    Package("torch-optimi", ("optimi",), recipes={"StableAdamW": Recipe(arguments={"triton": False})}),
    Package("prodigyopt", ("prodigyopt",)),
    Package("prodigy-plus-schedule-free", ("prodigyplus",)),
    Package(
        "pytorch_optimizer",
        ("pytorch_optimizer",),
        recipes={
            "AdaHessian": _GRAPH,
            "SophiaH": _GRAPH,
            "AliG": Recipe(closure="step", arguments={"max_lr": 0.1}),
            "AdamMini": Recipe(arguments={"num_embeds": 16, "num_heads": 4}),
            "BSAM": Recipe(closure="after", arguments={"num_data": 8, "lr": 0.01}),
            "SAM": _AFTER,
            "WSAM": _AFTER,
            "LookSAM": _AFTER,
            "FriendlySAM": _AFTER,
            "GSAM": Recipe(unusable="takes its batches by a method of its own, set_closure"),
            "SpectralSphere": Recipe(_matrices),
            "TRAC": Recipe(arguments={"s_prev": 1e-2}, note="with `s_prev=0.01`: it would hardly move in 20 steps"),
            "PCGrad": Recipe(backward=lambda optimizer, loss: optimizer.pc_backward([loss, loss * 0.5])),
            "Ranger21": Recipe(arguments={"num_iterations": NUM_STEPS}),
            "SafeFP16Optimizer": Recipe(
                backward=lambda optimizer, loss: optimizer.backward(loss, update_main_grads=True),
                named=False,
                note="its parameters are copies, so `wrap` is not given the model",
            ),
            **{name: Recipe(_muon_groups) for name in ("AdaGO", "AdaMuon", "Muon", "MuonClip", "NorMuon")},
            "DistributedMuon": Recipe(_muon_groups, group=True),
            "DeMo": _GROUP,
        },
    ),
    Package(
        "ranger21",
        ("ranger21",),
        recipes={
            "Ranger21": Recipe(arguments={"num_epochs": 4, "num_batches_per_epoch": 5}),
            "Ranger21abel": Recipe(arguments={"num_epochs": 4, "num_batches_per_epoch": 5}),
        },
    ),
    Package("schedulefree", ("schedulefree",)),
    Package(
        "timm",
        ("timm.optim",),
        bare=("timm", "timm.optim"),  # they want torchvision
        eager=True,
        recipes={"Adahessian": _GRAPH, "SGDP": Recipe(arguments={"lr": 1e-2})},
    ),
    Package(
        "torch",
        ("torch.optim",),
        recipes={
            "Muon": Recipe(_matrices),
            "SparseAdam": Recipe(model=_Looked),
            "LBFGS": Recipe(arguments={"lr": 0.1, "max_iter": 4}),
        },
    ),
    Package("torch-optimizer", ("torch_optimizer", "pytorch_ranger"), recipes={"Adahessian": _GRAPH}),
    Package("torchao", ("torchao.optim",), eager=True, width=64),
    Package("transformers", ("transformers.optimization",)),
)
