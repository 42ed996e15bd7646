"""Optimizers as people install them: odd classes of the packages in requirements.txt, where they are installed; and
the page of what sits in a model and what trains it."""

import importlib
import importlib.util
import warnings
from pathlib import Path

import pytest

pytest.importorskip("benchmarks.optimizers", reason="what measures is not beside these tests", exc_type=ImportError)

from benchmarks.optimizers import kinds, models, table
from benchmarks.optimizers.packages import PACKAGES, REQUIREMENTS
from benchmarks.optimizers.trial import judge
from benchmarks.readme import update

PACKAGE = {package.name: package for package in PACKAGES}
OURS = Path(__file__).with_name("requirements.txt")

# By package, module and class.
CLASSES = {
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


def class_of(package, module, name):
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


def pins(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    return {line.strip() for line in lines if "==" in line and not line.startswith("#")}


def test_every_package_of_the_table_is_pinned():
    pinned = {pin.split("==")[0] for pin in pins(REQUIREMENTS)}
    assert PACKAGE.keys() <= pinned | {"torch"}
    assert CLASSES.keys() <= {pin.split("==")[0] for pin in pins(OURS)}


def test_the_page_is_that_of_the_results():
    assert not update(kinds.PAGE, kinds.saved(), kinds.TABLES, check=True)


def test_every_kind_has_classes_that_were_tried():
    results = kinds.saved()["optimizers"]
    for kind, packages in kinds.KINDS.items():
        tried = {name.split("'s ")[1].split(".")[-1] for name, _ in kinds.chosen(results, kind)}
        assert tried == {name for names in packages.values() for name in names}, kind


@pytest.mark.slow
def test_what_sits_in_a_model_stays_to_the_bit(caplog):
    caplog.set_level("ERROR", logger="fastguard")
    found = [(model, optimizer, table.record(verdict)) for model, optimizer, verdict in models.verdicts()]
    assert len(found) == 15
    for model, optimizer, record in found:
        assert "unusable" not in record and not table.failures(record), (model, optimizer, record)
        is_unclear = "clip_unknown" in record or record.get("clip_torch_ulp") is not None
        assert is_unclear or record["clip_torch"] <= table.CLOSE, (model, optimizer, record)
