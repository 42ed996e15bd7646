"""The plug-in guards what it says it does, and the comparison can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import comparing
import pytest
import torch
import torch_optimizers
from guard_everything import MODES, guarding
from torch import optim
from torch_optimizers import OPTIMIZERS, make_parameters, take_steps

import fastguard

HERE = Path(__file__).parent


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "off"])
def test_every_optimizer_is_guarded_and_every_step_judged(mode: str) -> None:
    inits = {cls: cls.__init__ for cls in (optim.Optimizer, *(spec.cls for spec in OPTIMIZERS.values()))}
    with guarding(MODES[mode]) as guards:
        for spec in OPTIMIZERS.values():
            parameters = make_parameters(spec.shapes)
            optimizer = spec.cls(parameters, **spec.ways[0])
            assert isinstance(optimizer.guard, fastguard.Guard) and guards[-1]() is optimizer.guard
            take_steps(optimizer, parameters, range(2), sparse=spec.sparse == "only", closure=spec.closure)
            assert optimizer.guard.last.step == 1
            assert len(optimizer.guard.last.tensors) == len(parameters)
    assert len(guards) == len(OPTIMIZERS)
    assert {cls: cls.__init__ for cls in inits} == inits and "__init_subclass__" not in vars(optim.Optimizer)
    assert not hasattr(optim.SGD(parameters), "_guard") and "guard" not in vars(optim.SGD(parameters))


def test_classes_made_within_are_guarded_once() -> None:
    with guarding({}) as guards:

        class Late(optim.Adam):
            def __init__(self, params: Any) -> None:
                super().__init__(params)
                assert "guard" not in vars(self)  # not before the outermost constructor is over

        class Heir(Late):
            pass

        for cls in (Late, Heir):
            assert isinstance(cls(make_parameters([(2,)])).guard, fastguard.Guard)
    assert len(guards) == 2
    assert "guard" not in vars(Late(make_parameters([(2,)])))


def test_a_difference_is_found() -> None:
    """Also one of a single bit in a hundred steps, and an error."""

    @comparing.in_all_modes
    def differs(how: str) -> Any:
        optimizer = optim.SGD(make_parameters([(3,)]), lr=0.1)
        is_guarded = "_guard" in vars(optimizer)
        if how == "error" and is_guarded:
            raise KeyError("guarded")
        value = torch.ones(100)
        if how == "bit" and is_guarded:
            value[57] = torch.nextafter(value[57], torch.tensor(2.0))
        return [value]

    differs("nothing", modes=comparing.GUARDED, thorough=True)
    for how, words in (("bit", r"mode 'idle': \[0\]: "), ("error", "mode 'idle': 'guarded'")):
        with pytest.raises(AssertionError, match=words):
            differs(how, modes=comparing.GUARDED, thorough=True)

    @comparing.in_all_modes
    def guards_nothing() -> Any:
        return [1]

    with pytest.raises(AssertionError, match="no optimizer was guarded"):
        guards_nothing(modes=("idle",), thorough=True)


# --- what has to start Python anew ---

_ELSEWHERE = """
import torch

def test_it():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    p.grad = torch.tensor([1.0, float("nan"), 1.0])
    optimizer.step()
    assert not p.isnan().any()
    assert optimizer.guard.last.skipped and optimizer.guard.clip.max_norm == 1e9
"""


def _run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [str(HERE), str(Path(fastguard.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.slow
def test_tests_from_elsewhere(tmp_path: Path) -> None:
    """The plug-in is given to a pytest that knows nothing of this folder."""
    (tmp_path / "test_elsewhere.py").write_text(_ELSEWHERE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    ran = _run("-m", "pytest", "-p", "guard_everything", "--guard-everything", "max_norm=1e9", str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ", max_norm=1e9; torch" in ran.stdout and "1 passed" in ran.stdout


_DATABASE = """
import sys, types, unittest
try:
    import expecttest
except ImportError:  # torch.testing derives a class from one of it, which nobody needs here
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase
import torch
from torch.testing._internal.common_optimizers import optim_db
torch.save({
    info.optim_cls.__name__: {
        "inputs": [i.kwargs for i in info.optim_inputs_func("cpu")],
        "ways": sorted({w for w in info.supported_impls if w != "fused" or "cpu" in info.supports_fused_on}),
        "sparse": "only" if info.only_supports_sparse_grads else "too" if info.supports_sparse else "no",
        "is_complex": info.supports_complex,
        "closure": info.step_requires_closure,
        "groups": info.supports_param_groups,
    }
    for info in optim_db
}, sys.argv[1])
"""


@pytest.mark.slow
def test_the_configurations_of_torchs_own_tests(tmp_path: Path) -> None:
    """All of `torch.testing`'s database, in all ways, in all modes; and the table here knows every setting in it."""
    path = tmp_path / "database.pt"
    ran = _run("-c", _DATABASE, str(path))
    assert ran.returncode == 0, ran.stderr
    database = torch.load(path, weights_only=False)
    assert set(database) == set(OPTIMIZERS)
    num_configurations = 0
    for name, spec in OPTIMIZERS.items():
        info = database[name]
        known = {key for settings in (*spec.settings, *spec.ways) for key in settings} | {"lr", "differentiable"}
        assert {key for kwargs in info["inputs"] for key in kwargs} <= known, name
        assert (spec.sparse, spec.closure, spec.is_complex) == (info["sparse"], info["closure"], info["is_complex"])
        assert spec.groups == info["groups"]
        ways = {key for way in spec.ways for key, value in way.items() if value is True}
        assert ways | ({"differentiable"} if spec.is_differentiable else set()) == set(info["ways"]), name
        for kwargs in info["inputs"]:
            for way in [*spec.ways, *([{"differentiable": True}] if spec.is_differentiable else [])]:
                outcomes = []
                for settings in MODES.values():
                    with guarding(settings):
                        outcomes.append(comparing.attempt(_train, spec, {**kwargs, **way}))
                for mode, outcome in zip(MODES, outcomes):
                    comparing.assert_identical(outcome, outcomes[0], f"{name} {kwargs} {way} {mode}")
                assert not isinstance(outcomes[0], str) or "lr as a Tensor" in outcomes[0], outcomes[0]
                num_configurations += 1
    assert num_configurations >= 200


def _train(spec: torch_optimizers.Spec, settings: dict[str, Any]) -> Any:
    parameters = make_parameters(spec.shapes)
    if isinstance(settings.get("lr"), torch.Tensor):
        settings = {**settings, "lr": settings["lr"].clone()}
    with torch.no_grad() if settings.get("differentiable") else torch.enable_grad():
        optimizer = spec.cls(parameters, **settings)
        if settings.get("differentiable"):
            for p in parameters:
                p.requires_grad_(False)
        take_steps(optimizer, parameters, range(3), sparse=spec.sparse == "only", closure=spec.closure)
    return torch_optimizers.state_of(parameters, optimizer)
