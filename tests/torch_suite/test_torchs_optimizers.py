"""Every optimizer of torch.optim, in every configuration that torch's own tests have, guarded: the same bits, the same
state and the same errors as unguarded."""

import inspect
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from guard_everything import MODES, guarding
from guard_helpers import assert_identical
from torch import optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fastguard

OPTIMIZERS = {
    name: cls
    for name, cls in vars(optim).items()
    if isinstance(cls, type) and issubclass(cls, optim.Optimizer) and cls is not optim.Optimizer
}
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")

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
        "sparse": info.only_supports_sparse_grads,
        "complex": info.supports_complex,
        "closure": info.step_requires_closure,
        "groups": info.supports_param_groups,
    }
    for info in optim_db
}, sys.argv[1])
"""


def database():
    """What torch's tests know of each optimizer; read by another process, as importing it sets flags of torch."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "database.pt"
        ran = subprocess.run([sys.executable, "-c", _DATABASE, str(path)], capture_output=True)
        assert ran.returncode == 0, ran.stderr
        return torch.load(path, weights_only=False)


def known(name):
    """Some of it, from the signature of the optimizer: for ordinary runs: importing torch's tests takes long."""
    takes = inspect.signature(OPTIMIZERS[name]).parameters
    settings = {"weight_decay": 0.1, "maximize": True, "momentum": 0.9, "amsgrad": True, "centered": True}
    return {
        "inputs": [{}, *({key: value} for key, value in settings.items() if key in takes)],
        "ways": ["forloop", *(["foreach"] if "foreach" in takes else []), *(["fused"] if name in FUSED else [])],
        "sparse": name == "SparseAdam",
        "complex": name not in ("Adafactor", "Muon", "SparseAdam"),
        "closure": name == "LBFGS",
        "groups": name != "LBFGS",
    }


@pytest.fixture(autouse=True, scope="session")
def _sparse_tensors_unchecked():
    """Said in so many words, since torch warns where it is not."""
    with torch.sparse.check_sparse_tensor_invariants(False):
        yield


def attempt(call, *args, **kwargs):
    """What a call gives, or type and message of its error."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(v) for key, v in value.items()}
    return [copied(v) for v in value] if isinstance(value, (list, tuple)) else value


def make_parameters(name, info, way):
    """Several dtypes, odd shapes, one transposed, as far as the optimizer takes them."""
    made = [torch.randn(4, 3), torch.randn(2, 5)]
    if not info["sparse"] and not info["closure"] and name != "Muon":
        made += [torch.randn(5), torch.randn(()), torch.randn(3, dtype=torch.float64), torch.randn(6, 4).T]
        made.append(torch.randn(3, 2).bfloat16())
        if name != "Adafactor":
            made.append(torch.empty(0))
        if info["complex"] and not way.get("fused"):
            made.append(torch.randn(3, dtype=torch.complex64))
    return [torch.nn.Parameter(p, requires_grad=not way.get("differentiable")) for p in made]


def set_gradients(parameters, sparse=False):
    for p in parameters:
        if sparse:
            rows = torch.randint(p.shape[0], (1, 3))  # may come twice: not coalesced
            p.grad = torch.sparse_coo_tensor(rows, torch.randn(3, *p.shape[1:]), p.shape)
        else:
            p.grad = torch.randn_like(p)


def loss_of(optimizer, parameters):
    def closure():
        optimizer.zero_grad()
        loss = torch.stack([(p - 0.1).abs().square().sum().double() for p in parameters]).sum()
        loss.backward()
        return loss

    return closure


def train(name, info, settings, way):
    """All that comes of a few steps: a missing gradient, zeros, a group and a rate that change, hooks, a closure, and
    another optimizer that goes on from the state."""
    torch.manual_seed(3)
    settings = copied(settings)
    parameters = make_parameters(name, info, way)
    optimizer = OPTIMIZERS[name](parameters, **settings, **way)
    calls = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before all")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after all")),
        optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append(f"before {len(args)} {sorted(kwargs)}")),
        optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(f"after {len(args)} {sorted(kwargs)}")),
    ]
    gave = []
    try:
        for step in range(4):
            set_gradients(parameters, info["sparse"])
            if step == 1:
                parameters[0].grad = None
                if info["sparse"]:
                    parameters[1].grad = parameters[1].grad.coalesce()
            elif step == 2 and not info["sparse"]:
                for p in parameters:
                    p.grad = torch.zeros_like(p)
            if step == 2 and info["groups"]:
                added = make_parameters(name, info, way)[:1]
                optimizer.add_param_group({"params": added})
                set_gradients(added, info["sparse"])
                parameters = [*parameters, *added]
            if step == 3 and not isinstance(settings.get("lr"), torch.Tensor):
                optimizer.param_groups[0]["lr"] = 0.02
            arguments = [loss_of(optimizer, parameters)] if info["closure"] else []
            gave.append(copied(optimizer.step(*arguments)))
        if not info["sparse"] and not way.get("differentiable"):
            gave.append(copied(optimizer.step(closure=loss_of(optimizer, parameters))))
    finally:
        for handle in handles:
            handle.remove()
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    others = [torch.nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in parameters]
    groups = [{"params": others[:-1]}, {"params": others[-1:]}] if info["groups"] else others
    other = OPTIMIZERS[name](groups, **copied(settings), **way)
    other.load_state_dict(state)
    set_gradients(others, info["sparse"])
    gave.append(copied(other.step(*([loss_of(other, others)] if info["closure"] else []))))
    return copied([calls, gave, parameters, optimizer.state_dict(), others, other.state_dict()])


def ways_of(info):
    plain = {"foreach": False} if "foreach" in info["ways"] else {}
    return [plain if way == "forloop" else {way: True} for way in info["ways"]]


def compare(name, info, modes):
    """Fails unless `name` ends in the same state unguarded and in each of `modes`, for all settings and ways."""
    for settings in info["inputs"]:
        for way in ways_of(info):
            expected = attempt(train, name, info, settings, way)
            refuses = ("lr as a Tensor", "Tensor lr")
            assert not isinstance(expected, str) or any(text in expected for text in refuses), expected
            for mode in modes:
                with guarding(MODES[mode]) as guards:
                    found = attempt(train, name, info, settings, way)
                assert guards
                assert_identical(found, expected, f"{settings} {way} {mode}")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_usual_configurations(name):
    compare(name, known(name), ["max_norm=1e9"])


@pytest.mark.slow
def test_every_configuration():
    infos = database()
    assert set(infos) == set(OPTIMIZERS)
    for name, info in infos.items():
        simple = known(name)
        assert [info[key] for key in ("sparse", "closure", "groups")] == [
            simple[k] for k in ("sparse", "closure", "groups")
        ]
        compare(name, {**info, "ways": info["ways"] or ["forloop"]}, [mode for mode in MODES if mode != "off"])


def in_all_modes(test):
    """What `test` returns must be the same, unguarded and in each mode."""
    outcomes = []
    for settings in MODES.values():
        torch.manual_seed(3)
        with guarding(settings):
            outcomes.append(test())
    for mode, outcome in zip(MODES, outcomes, strict=True):
        assert_identical(outcome, outcomes[0], mode)


@pytest.mark.parametrize("name", FUSED)
def test_a_flag_handed_to_fused_kernels(name):
    """`found_inf` and `grad_scale`, set by hand as a scaler does."""

    def run():
        parameters = make_parameters(name, known(name), {"fused": True})
        optimizer = OPTIMIZERS[name](parameters, fused=True)
        results = []
        for found, scale in [(0.0, 1.0), (1.0, 1.0), (0.0, 4.0), (1.0, 2.0), (0.0, 1.0)]:
            optimizer.found_inf, optimizer.grad_scale = torch.tensor(found), torch.tensor(scale)
            set_gradients(parameters)
            optimizer.step()
            results.append(copied([parameters, optimizer.state_dict()]))
        del optimizer.found_inf, optimizer.grad_scale
        set_gradients(parameters)
        optimizer.step()
        return [*results, copied([parameters, optimizer.state_dict()])]

    in_all_modes(run)


def test_steps_that_are_differentiated():
    def run():
        start, slope = (torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
        p = start.clone()
        optimizer = optim.Adam([p], differentiable=True)
        p.grad = slope.clone()
        optimizer.step()
        return copied([*torch.autograd.grad(p.square().sum(), [start, slope]), p])

    in_all_modes(run)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "off"])
def test_every_step_is_judged(mode):
    inits = {cls: cls.__init__ for cls in (optim.Optimizer, *OPTIMIZERS.values())}
    with guarding(MODES[mode]) as guards:
        for cls in (optim.SGD, optim.AdamW, optim.Adafactor):
            p = torch.nn.Parameter(torch.ones(2, 3))
            optimizer = cls([p])
            assert isinstance(optimizer.guard, fastguard.Guard) and guards[-1]() is optimizer.guard
            for _ in range(2):
                p.grad = torch.ones_like(p)
                optimizer.step()
            assert (optimizer.guard.last.step, len(optimizer.guard.last.tensors)) == (1, 1)
    assert {cls: cls.__init__ for cls in inits} == inits and "__init_subclass__" not in vars(optim.Optimizer)
    assert not hasattr(optim.SGD([p]), "guard")


def test_a_difference_is_found():
    """Also one of a single bit in a hundred steps."""

    def differs():
        value = torch.ones(100)
        if hasattr(optim.SGD([torch.nn.Parameter(torch.ones(3))]), "guard"):
            value[57] = torch.nextafter(value[57], torch.tensor(2.0))
        return [value]

    with pytest.raises(AssertionError, match="is not tensor"):
        in_all_modes(differs)
