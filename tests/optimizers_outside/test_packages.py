"""Optimizers as people install them: odd classes of the packages in requirements.txt, where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks.optimizers", reason="what measures is not beside these tests", exc_type=ImportError)

from benchmarks.optimizers import table
from benchmarks.optimizers.packages import PACKAGES, REQUIREMENTS
from benchmarks.optimizers.trial import judge

PACKAGE = {package.name: package for package in PACKAGES}
OURS = Path(__file__).with_name("requirements.txt")

# By package, module and class.
CLASSES: dict[str, dict[str, tuple[str, ...]]] = {
    "dadaptation": {"dadaptation": ("DAdaptAdam", "DAdaptSGD")},
    "lion-pytorch": {"lion_pytorch": ("Lion",), "lion_pytorch.foreach": ("Lion",)},
    "madgrad": {"madgrad": ("MADGRAD", "MirrorMADGRAD")},
    "muon-optimizer": {"muon": ("SingleDeviceMuon", "SingleDeviceMuonWithAuxAdam")},
    "pytorch_optimizer": {
        "pytorch_optimizer": (
            "ASGD", "Adai", "AdamS", "DAdaptLion", "FriendlySAM", "Lookahead", "Magma", "OrthoGrad", "Prodigy",
            "Ranger21", "SAM", "SPAM", "ScheduleFreeWrapper", "StableSPAM", "TRAC",
        )
    },
    "schedulefree": {
        "schedulefree": (
            "AdamWScheduleFree", "AdamWScheduleFreeClosure", "RAdamScheduleFreeClosure", "SGDScheduleFreeClosure",
        )
    },
    "torch-optimi": {"optimi": ("Adam", "Ranger")},
    "torch-optimizer": {"torch_optimizer": ("A2GradUni", "Adafactor", "Adahessian")},
}  # fmt: skip
CASES = [
    (package, module, cls) for package, modules in CLASSES.items() for module, names in modules.items() for cls in names
]


def class_of(package: str, module: str, name: str) -> Any:
    if importlib.util.find_spec(module.split(".")[0]) is None:
        pytest.skip(f"{package} is not installed: pip install --no-deps -r tests/optimizers_outside/requirements.txt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(module), name)


@pytest.mark.slow
@pytest.mark.parametrize(("package", "module", "name"), CASES, ids=[f"{module}.{name}" for _, module, name in CASES])
def test_guarded(package, module, name):
    cls = class_of(package, module, name)
    verdict = judge(cls, PACKAGE[package].way(cls))
    assert verdict.unusable is None
    signs = table.failures(table.record(verdict))
    assert signs == {}


@pytest.mark.slow
def test_one_that_hooks_cannot_be_put_on_is_refused():
    cls = class_of("torch-optimizer", "torch_optimizer", "Lookahead")
    verdict = judge(cls, PACKAGE["torch-optimizer"].way(cls))
    assert "got Lookahead, which never calls Optimizer.__init__" in verdict.refused


def pins(path: Path) -> set[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return {line.strip() for line in lines if "==" in line and not line.startswith("#")}


def test_every_package_of_the_table_is_pinned():
    pinned = {pin.split("==")[0] for pin in pins(REQUIREMENTS)}
    assert PACKAGE.keys() <= pinned | {"torch"}
    assert CLASSES.keys() <= {pin.split("==")[0] for pin in pins(OURS)}
