"""Which judge a run gets; on a device no fused step waits, and in the steady state none makes tensors."""

import math

import pytest
import torch
from device_helpers import Watch, slow, watched
from guard_helpers import guarded_model, loss_at, make_model, poison, take_step, train
from torch import nn

import fastguard
from fastguard.kernels import registry
from fastguard.kernels.triton import Workspace
from fastguard.kernels.triton.launch import Launcher
from fastguard.step import device as engines
from fastguard.step.device import NUM_PENDING, TorchEngine

FUSED = {
    "SGD": lambda params, **kw: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda params, **kw: torch.optim.Adam(params, fused=True),
    "AdamW": lambda params, **kw: torch.optim.AdamW(params, lr=torch.tensor(0.05), fused=True),
    "Adagrad": lambda params, **kw: torch.optim.Adagrad(params, fused=True),
}
every_fused = pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)


def _train_watched(model, optimizer, num_steps=6, bad=3):
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_at(model, step)
        loss.backward()
        if step == bad:
            poison(model, math.nan)
        with watched() as watch:
            optimizer.step()
            optimizer.guard.observe(loss=loss)
        # The first step makes tables, of numbers that the host has.
        assert step == 0 or not watch.waits, f"step {step}"


@pytest.mark.thinned(interpreted=9)
@every_fused
@pytest.mark.parametrize("clip_through", ["scale", "grad_scale"])
@pytest.mark.parametrize("max_norm", [pytest.param(None, marks=pytest.mark.slow), 0.05])
def test_fused_optimizers(make, clip_through, max_norm, engine):
    model, optimizer = guarded_model(make, max_norm=max_norm, clip_through=clip_through)
    slow(optimizer)
    _train_watched(model, optimizer)
    optimizer.guard.flush()
    assert optimizer.guard.history.num_skipped == 1


@pytest.mark.thinned(interpreted=4)
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_under_a_scaler(unscales, max_norm, engine):
    model, optimizer = guarded_model(lambda p: torch.optim.AdamW(p, fused=True), max_norm=max_norm)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_at(model, step)).backward()
        if step == 2:
            poison(model, math.inf)
        with watched() as watch:
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        assert step == 0 or not watch.waits, f"step {step}"
        scaler.update()
    optimizer.guard.flush()
    assert [e.skipped for e in optimizer.guard.history.recent] == [False, False, True, False, False]
    scales = [8.0, 8.0, 8.0, 4.0, 4.0]
    assert [e.loss_scale for e in optimizer.guard.history.recent] == ([None] * 5 if unscales else scales)


@pytest.mark.thinned(interpreted=4)
@pytest.mark.parametrize(("skip_nonfinite", "waits"), [(True, 1), (False, 0)])
def test_others_wait_for_one_number(skip_nonfinite, waits, engine):
    model = make_model()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    fastguard.wrap(optimizer, model, max_norm=0.05, skip_nonfinite=skip_nonfinite)
    for step in range(3):
        optimizer.zero_grad()
        loss_at(model, step).backward()
        attachment = optimizer.guard._hooks[0]
        with watched() as watch:
            attachment._before(optimizer, (optimizer,), {})
        assert watch.waits.count("__bool__") == waits
        attachment._after(optimizer, (optimizer,), {})


def test_the_watch_sees_what_it_should():
    one = torch.ones(())
    ways = [float, bool, torch.nonzero, lambda t: t.item(), lambda t: t.tolist(), lambda t: torch.equal(t, t)]
    for asks in ways:
        with watched() as watch:
            asks(one)
        assert watch.waits, asks
    with watched() as watch:
        torch.zeros(2), torch.empty(2), one.clone(), torch.full((), 2.0)
    assert len(watch.allocations) == 4


@pytest.fixture
def launches(monkeypatch, interpreted):
    """Names of the kernels that are launched."""
    names = []
    launch = Launcher.__call__

    def counting(self, grid, *arguments):
        names.append(getattr(self.function, "__name__", None) or self.function.fn.__name__)
        launch(self, grid, *arguments)

    monkeypatch.setattr(Launcher, "__call__", counting)
    return names


@pytest.mark.thinned(interpreted=4)
@pytest.mark.parametrize(("max_norm", "scaling"), [(None, 0), (math.inf, 0), (0.05, 1), (1e6, 1)])
def test_two_launches_and_one_to_scale(max_norm, scaling, launches):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fastguard.wrap(optimizer, model, max_norm=max_norm, backend="triton")
    for step in range(3):
        launches.clear()
        take_step(model, optimizer, step)
        assert launches == ["stats_kernel", "finalise_kernel", "scale_kernel"][: 2 + scaling]


@pytest.mark.long_interpreted
@pytest.mark.thinned(interpreted=4)
@pytest.mark.parametrize("clip_through", ["scale", "grad_scale"])
def test_nothing_is_allocated_in_the_steady_state(clip_through, launches):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
    fastguard.wrap(optimizer, model, max_norm=0.05, backend="triton", clip_through=clip_through)
    attachment = optimizer.guard._hooks[0]
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    loss = torch.tensor(1.5)
    for step in range(20):  # once around the ring
        if step == 10:
            next(model.parameters()).grad[0] = math.inf
        with Watch() as watch:
            attachment._before(optimizer, (optimizer,), {})
            optimizer.guard.observe(loss=loss)
        attachment._after(optimizer, (optimizer,), {})
        assert step == 0 or not watch.allocations, f"step {step}"
    assert optimizer.guard._judge.on_device.engine.tables.num_misses == 1


@pytest.mark.parametrize(
    ("device", "backend", "expected"),
    [
        ("cpu", "auto", None),
        ("cpu", "cpu", None),
        ("cpu", "reference", None),
        ("cpu", "triton", Workspace),
        ("cuda", "auto", Workspace),
        ("cuda", "triton", Workspace),
        ("cuda", "reference", TorchEngine),
        ("cuda", "cpu", None),
        ("xpu", "auto", Workspace),
        ("mps", "auto", TorchEngine),
        ("mps", "reference", TorchEngine),
        ("meta", "auto", None),
    ],
)
def test_engines(device, backend, expected, monkeypatch):
    triton = registry.BACKENDS["triton"]
    monkeypatch.setattr(triton, "accepts", lambda d: d.type in ("cuda", "xpu"))
    monkeypatch.setattr(triton, "unavailable", lambda: None)
    monkeypatch.setattr(triton, "problem_on", lambda device, operation: None)
    assert engines.engine_for(torch.device(device), backend) is expected


@pytest.mark.parametrize("asked", ["unavailable", "problem_on"])
def test_without_triton_a_gpu_gets_plain_torch_and_one_line(asked, monkeypatch, caplog):
    triton = registry.BACKENDS["triton"]
    monkeypatch.setattr(triton, "accepts", lambda d: d.type == "cuda")
    monkeypatch.setattr(triton, "unavailable", lambda: None)
    monkeypatch.setattr(triton, asked, lambda *arguments: "it is Tuesday")
    registry.say_once.cache_clear()
    for _ in range(2):
        assert engines.engine_for(torch.device("cuda"), "auto") is TorchEngine
    assert [r.getMessage().split(".")[0] for r in caplog.records] == ["backend 'triton' cannot run: it is Tuesday"]


def test_an_optimizer_without_a_way_to_skip_keeps_the_host(engine):
    model, optimizer = guarded_model(lambda p: torch.optim.LBFGS(p, max_iter=2))
    take_step(model, optimizer, 0, closure=True)
    assert optimizer.guard._run.waits


def test_what_no_engine_can_read_goes_to_the_host(engine, monkeypatch):
    """As a gradient on the CPU while the rest is on a GPU. What was on its way is delivered first."""
    model, memory = make_model(), fastguard.MemorySink()
    optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters(), fused=True), model, sinks=[memory])
    slow(optimizer)
    train(model, optimizer, range(2))
    assert not optimizer.guard._run.waits

    def plan(tensors, *, writable=False):
        raise fastguard.UnsupportedTensorError(1, "must be on cuda:0, got cpu")

    monkeypatch.setattr(optimizer.guard._judge.on_device.engine, "plan", plan)
    take_step(model, optimizer, 2)
    assert optimizer.guard._run.waits
    assert memory.series("step") == [0, 1]
    train(model, optimizer, range(3, 5))
    optimizer.guard.flush()
    assert memory.series("step") == [0, 1, 2, 3, 4]


def test_parameters_on_several_devices_go_to_the_host(engine):
    model = make_model()
    elsewhere = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = fastguard.wrap(torch.optim.SGD([*model.parameters(), elsewhere], lr=0.1), model, max_norm=1.0)
    train(model, optimizer, range(2))
    assert optimizer.guard._run.waits and optimizer.guard.last.step == 1


def test_a_model_that_moves_takes_its_records_along(monkeypatch):
    """As `model.to("cuda")` after `wrap` does, and back."""
    model, memory = make_model(), fastguard.MemorySink()
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1, fused=True), model, sinks=[memory])
    kinds = []
    for step in range(6):
        if step % 2 == 0:
            engine = TorchEngine if step == 2 else None
            monkeypatch.setattr(engines, "engine_for", lambda device, backend, engine=engine: engine)
            optimizer.guard._judge._was_on_cpu, optimizer.guard._run.is_short = None, False
        take_step(model, optimizer, step, bad=math.nan if step == 3 else None)
        kinds.append(optimizer.guard._run.waits)
    assert kinds == [True, True, False, False, True, True]
    optimizer.guard.flush()
    assert memory.series("step") == [0, 1, 2, 3, 4, 5]
    assert [r.skipped for r in memory.records] == [False, False, False, True, False, False]


def test_a_step_that_could_not_be_measured_takes_no_slot(engine, monkeypatch):
    model, optimizer = guarded_model(lambda p: torch.optim.AdamW(p, fused=True))
    take_step(model, optimizer, 0)
    on_device = optimizer.guard._judge.on_device
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with monkeypatch.context() as patched:
        patched.setattr(on_device.engine, "measure", lambda *args: 1 / 0)
        for _ in range(2 * NUM_PENDING):
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
    take_step(model, optimizer, 1)
    optimizer.guard.flush()
    assert (optimizer.guard.last.step, optimizer.guard.history.num_steps) == (1, 2)
