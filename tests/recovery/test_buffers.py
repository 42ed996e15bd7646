"""A skipped step leaves buffers finite: what its forward pass made NaN or Inf in them is put back."""

import copy
import logging
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastguard
from fastguard.observers import buffers
from fastguard.step import device as engines
from fastguard.step.device import TorchEngine

NAN_AT = (0, 3, 4, 8)


class Averages(nn.Module):
    """Buffers of many kinds: made anew in each pass, written in place, never written."""

    def __init__(self):
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.register_buffer("image", torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.register_buffer("wave", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("missing", None)

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().float().mean(0)
            self.image.mul_(0.9).add_(x.detach().float().mean())
            self.wave *= torch.complex(x.detach().float().mean().cos(), x.detach().float().mean())
            self.count += 1
        return x - self.mean.to(x.dtype)


def make(*more, dtype=torch.float32):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), *more, nn.ReLU(), nn.Linear(8, 4))
    return model if dtype == torch.float32 else model.to(dtype)


def batch(step, model, *, bad=None):
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
    if bad is not None:
        x[2, 3] = bad
    return x


def step_of(model, optimizer, step, *, bad=None, wrapped=None):
    optimizer.zero_grad()
    (model if wrapped is None else wrapped)(batch(step, model, bad=bad)).square().mean().backward()
    optimizer.step()


def is_finite(model):
    model.eval()
    with torch.no_grad():
        found = bool(model(batch(99, model)).isfinite().all())
    model.train()
    return found


def everything(model):
    return [t.clone() for t in (*model.parameters(), *model.buffers())]


def assert_same(model, other):
    for a, b in zip(everything(model), other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(params=["host", "device"])
def way(request, monkeypatch):
    """Where it is decided what is skipped: here, or where nobody waits for it."""
    if request.param == "device":
        monkeypatch.setattr(engines, "engine_for", lambda device, backend: TorchEngine)
    return str(request.param)


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("kind", ["short", "long", "closure", "fused"])
def test_it_is_as_if_the_batch_had_never_been(way, kind):
    bad = math.inf if kind == "long" else math.nan
    model = make(Averages())
    plain = copy.deepcopy(model)
    settings = {"fused": True} if kind == "fused" else {"foreach": False}
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01, **settings)
    guarded = fastguard.wrap(torch.optim.Adam(model.parameters(), lr=0.01, **settings), model)
    if kind == "long":
        guarded.guard._run.is_short = guarded.guard._hooks[0]._may_be_short = False
    for step in range(10):
        is_bad = step in NAN_AT

        def closure(step=step, is_bad=is_bad):
            guarded.zero_grad()
            loss = model(batch(step, model, bad=bad if is_bad else None)).square().mean()
            loss.backward()
            return loss

        if kind == "closure":
            guarded.step(closure)
        else:
            step_of(model, guarded, step, bad=bad if is_bad else None)
        if not is_bad:
            step_of(plain, optimizer, step)
        assert is_finite(model)
        assert_same(model, everything(plain))
    guarded.guard.flush()
    assert [e.step for e in guarded.guard.history.recent if e.skipped] == list(NAN_AT)


@pytest.mark.thinned(n=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_every_dtype_and_amp_mode(dtype, autocast, scaled):
    model = make(dtype=dtype)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=8.0)
    for step in range(6):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch(step, model, bad=math.nan if step in (0, 3) else None)).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert is_finite(model)
    assert model[1].num_batches_tracked == 4


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPERS = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "scripted": torch.jit.script,
    "parallel": nn.parallel.DistributedDataParallel,
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("wrapper", [pytest.param("compiled", marks=pytest.mark.slow), "scripted", "parallel"])
def test_wrapped_models(wrapper):
    model = make()
    wrapped = WRAPPERS[wrapper](model)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.01), wrapped)
    for step in range(5):
        step_of(model, optimizer, step, bad=math.nan if step in (0, 3) else None, wrapped=wrapped)
        assert is_finite(model)


def test_what_was_loaded_is_what_is_put_back():
    model = make()
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.01), torch.compile(model, backend="eager"))
    for step in range(5):
        step_of(model, optimizer, step)
    state = {name: torch.full_like(value, 7) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    step_of(model, optimizer, 5, bad=math.nan)
    assert set(model[1].running_mean.tolist()) == {7.0} and model[1].num_batches_tracked == 7


def test_buffers_that_come_or_change_later():
    model = make(Averages())
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model)
    step_of(model, optimizer, 0)
    averages = model[2]
    averages.image = torch.zeros(4, 3, 2, 2)  # another size
    averages.register_buffer("late", torch.zeros(2))
    step_of(model, optimizer, 1)
    del averages.late
    step_of(model, optimizer, 2)
    step_of(model, optimizer, 3, bad=math.nan)
    assert is_finite(model) and averages.image.shape == (4, 3, 2, 2) and bool(averages.image.isfinite().all())
    model.double()
    step_of(model, optimizer, 4)
    step_of(model, optimizer, 5, bad=math.nan)
    assert is_finite(model) and averages.image.dtype == torch.float64
    assert not optimizer.guard._run.failures.counts()


def test_too_many_skips_raise_and_leave_finite_buffers():
    model = make()
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, max_consecutive_skips=2)
    step_of(model, optimizer, 0)
    before = everything(model)
    step_of(model, optimizer, 1, bad=math.nan)
    with pytest.raises(fastguard.NonFiniteGradientsError):
        step_of(model, optimizer, 2, bad=math.nan)
    assert_same(model, before)


def test_what_raises_is_counted_and_training_goes_on(monkeypatch, caplog):
    model = make()
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model)

    def broken(self, skipped):
        raise ValueError("broken")

    monkeypatch.setattr(buffers.Buffers, "_follow", broken)
    with caplog.at_level(logging.WARNING, "fastguard"):
        step_of(model, optimizer, 0)
    assert "buffers" in caplog.text and optimizer.guard.last.step == 0


def test_a_large_buffer_is_followed_like_a_small_one(monkeypatch):
    states = []
    for small in (buffers._SMALL_BYTES, 16):
        monkeypatch.setattr(buffers, "_SMALL_BYTES", small)
        model = make(Averages())
        optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step in range(10):
            step_of(model, optimizer, step, bad=math.nan if step in (4, 8) else None)
        states.append(copy.deepcopy(model.state_dict()))
        assert is_finite(model)
    assert all(torch.equal(a, b) for a, b in zip(*(state.values() for state in states), strict=True))
