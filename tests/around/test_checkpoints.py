"""Checkpoints: whole or not there, the right ones kept, nothing spoilt, and a run that goes on bit for bit."""

import collections
import copy
import errno
import io
import math
import os
import random
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from guard_helpers import is_identical
from torch import nn

import fastguard
from fastguard import Checkpoints
from fastguard.report import whole_file as module


def make(**settings):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, fastguard.wrap(optimizer, model, max_norm=1.0, **settings)


def take_step(model, optimizer):
    x = torch.randn(8, 4) * random.uniform(0.5, 1.5) + float(np.random.rand())
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def names(checkpoints):
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_trap_26_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    class Parts:
        """A run with all that belongs to one."""

        def __init__(self):
            self.model, self.optimizer = make()
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
            self.average = torch.optim.swa_utils.AveragedModel(self.model, use_buffers=True)
            self.stop = fastguard.EarlyStopping(3, restore_best=True)
            self.order = torch.Generator().manual_seed(5)
            parts = ("scheduler", "scaler", "average", "stop", "order")
            self.checkpoints = Checkpoints(tmp_path, state={name: getattr(self, name) for name in parts})

        def go_on(self, start, end):
            for step in range(start, end):
                x = torch.randn(8, 4, generator=self.order) * random.uniform(0.5, 1.5) + float(np.random.rand())
                self.scaler.scale(self.model(x).square().mean()).backward()
                if step == 5:
                    self.model[0].weight.grad[0, 0] = math.inf
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.average.update_parameters(self.model)
                self.stop(self.optimizer.guard, 1.0 / (step + 1))

        def all(self):
            names = ("model", "optimizer", "scaler", "average", "stop", "scheduler")
            found = {name: getattr(self, name).state_dict() for name in names}
            guard = self.optimizer.guard.state_dict()
            guard["history"].pop("recent"), guard["history"].pop("clean")  # times of steps
            return {**found, "step": guard["step"], "skipped": guard["history"]["num_skipped"]}

    random.seed(1), np.random.seed(1)
    first = Parts()
    first.go_on(0, 7)
    path = first.checkpoints.save(first.optimizer.guard, 7, metric=0.5)
    first.go_on(7, 12)
    expected, numbers = first.all(), (random.random(), np.random.rand(), torch.rand(1))

    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    again = Parts()
    take_step(again.model, again.optimizer)  # whatever it did before
    assert again.checkpoints.load(again.optimizer.guard) == 7
    again.go_on(7, 12)
    assert is_identical(again.all(), expected)
    assert is_identical((random.random(), np.random.rand(), torch.rand(1)), numbers)
    assert path == again.checkpoints.latest() == again.checkpoints.best()


def test_trap_26_float32_state_of_bfloat16_parameters_stays(tmp_path):
    model = nn.Linear(3, 3).bfloat16()
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    masters = [p.detach().float() + 1e-4 for p in model.parameters()]
    for p, master in zip(model.parameters(), masters):
        optimizer.state[p].update(master=master.clone(), num=1)
    Checkpoints(tmp_path).save(optimizer.guard, 1)
    for state in optimizer.state.values():
        state.update(master=torch.zeros(3), num=2)
    Checkpoints(tmp_path).load(optimizer.guard)
    for p, master in zip(model.parameters(), masters):
        assert optimizer.state[p]["master"].dtype is torch.float32 and torch.equal(optimizer.state[p]["master"], master)
        assert optimizer.state[p]["num"] == 1
    state = optimizer.state_dict()  # torch alone rounds it
    optimizer.load_state_dict(state)
    assert all(optimizer.state[p]["master"].dtype is torch.bfloat16 for p in model.parameters())


def test_trap_24_which_are_kept(tmp_path):
    _, optimizer = make()
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=1)
    assert checkpoints.latest() is None and checkpoints.best() is None and checkpoints.load(optimizer.guard) == 0
    for step, metric in ((8, 0.5), (9, 0.25), (10, math.nan), (11, 0.75), (12, None), (13, math.inf), (14, -math.inf)):
        checkpoints.save(optimizer.guard, step, metric)
    kept = ("09_metric-0.25", "13_metric-inf", "14_metric--inf")
    assert names(checkpoints) == [f"step-000000{name}.pt" for name in kept]
    assert checkpoints.latest().name.startswith("step-00000014") and checkpoints.best().name.startswith("step-00000009")
    checkpoints.save(optimizer.guard, 14, metric=torch.tensor(0.125))  # once more, with a metric: it takes its place
    assert names(checkpoints) == ["step-00000013_metric-inf.pt", "step-00000014_metric-0.125.pt"]
    assert checkpoints.best() == checkpoints.latest()  # one file, counted once
    checkpoints = Checkpoints(tmp_path / "max", 1, 2, mode="max")
    for step, metric in enumerate((0.1, 0.9, math.inf, 0.9, 1e-7, math.nan)):
        checkpoints.save(optimizer.guard, step, metric)
    assert [c.step for c in checkpoints.all()] == [1, 3, 5] and checkpoints.best().name == "step-00000001_metric-0.9.pt"


def test_trap_24_steps_are_numbers_and_not_text(tmp_path):
    _, optimizer = make()
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=0)
    for step in (9, 10, 99_999_999, 100_000_000):
        checkpoints.save(optimizer.guard, step)
        assert [c.step for c in checkpoints.all()] == [step]
    for name in ("step-9.txt", "step-x.pt", "step-5_metric-good.pt", "notes"):
        (tmp_path / name).touch()
    (tmp_path / "step-00000007.pt").mkdir()
    assert checkpoints.latest().name == "step-100000000.pt"


def test_trap_24_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    class Full(io.FileIO):
        def write(self, data):
            if self.tell() + len(data) > 4096:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    _, optimizer = make()
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    first = checkpoints.save(optimizer.guard, 1)
    with monkeypatch.context() as patch:
        patch.setattr(module, "open", Full, raising=False)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(optimizer.guard, 2)
    assert names(checkpoints) == [first.name] and checkpoints.load(optimizer.guard) == 1
    others = tmp_path / f".step-00000002.pt{module.UNFINISHED}"
    others.write_bytes(b"half of what another process is writing")
    checkpoints.save(optimizer.guard, 2)
    assert names(checkpoints) == [others.name, "step-00000002.pt"]


@pytest.mark.skipif(sys.platform == "win32", reason="opens no folders, and has no mode bits")
def test_traps_23_and_24_file_and_folder_reach_the_disk(tmp_path, monkeypatch):
    done = []
    plain_fsync, plain_replace = os.fsync, os.replace

    def fsync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        done.append("folder" if is_folder else "file" if os.fstat(descriptor).st_size > 1000 else "empty file")
        plain_fsync(descriptor)

    def replace(source, target):
        assert source.parent == target.parent == tmp_path / "new"  # no rename across file systems
        assert not target.exists() and source.stat().st_size > 1000
        done.append("rename")
        plain_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    _, optimizer = make()
    before = os.umask(0o027)
    try:
        path = Checkpoints(tmp_path / "new").save(optimizer.guard, 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert done == ["folder", "file", "rename", "folder"]  # that above the new folder first


def test_trap_16_what_is_not_finite_takes_no_place_of_what_is(tmp_path):
    model, optimizer = make()
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    good = checkpoints.save(optimizer.guard, 1, metric=1.0)
    spoil = {
        "a parameter": lambda: model[0].weight.data[0].fill_(math.inf),
        "a buffer": lambda: model[1].running_mean.fill_(math.nan),
        "a moment": lambda: optimizer.state[model[4].bias]["exp_avg"].fill_(math.nan),
    }
    take_step(model, optimizer)
    checkpoints.save(optimizer.guard, 2, metric=0.9)
    for number, (what, do) in enumerate(spoil.items()):
        checkpoints.load(optimizer.guard)
        do()
        with pytest.warns(RuntimeWarning, match=r"step 3 holds NaN or Inf in 1 tensors \((0.weight|1.running|4.bias)"):
            path = checkpoints.save(optimizer.guard, 3, metric=0.1)
        assert path.name == "not-finite_step-00000003_metric-0.1.pt", what
        assert names(checkpoints) == [path.name, "step-00000002_metric-0.9.pt"] and not good.exists()
        bad = torch.load(path, weights_only=True)["model"]["0.weight"]
        assert bad.isinf().any(), "the first of them is the one that is kept"
        assert number == 0 or bad.isinf().sum() == 4
    assert checkpoints.load(optimizer.guard) == 2 and model[0].weight.isfinite().all()


def test_trap_25_all_that_is_written_loads_as_weights(tmp_path):
    model, optimizer = make(activations={"every": 1, "overhead_budget": None}, weights=1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for _ in range(3):
        take_step(model, optimizer)
    checkpoints = Checkpoints(tmp_path, state={"scheduler": scheduler})
    np.random.seed(4)
    found = torch.load(checkpoints.save(optimizer.guard, 3), weights_only=True)
    assert found["guard"]["step"] == 3
    assert list(found) == ["version", "step", "metric", "model", "optimizers", "guard", "state", "random"]


class Part:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state): ...


@pytest.mark.parametrize("value", [collections.deque([1]), np.float64(1.0), np.ones(2), Path("."), lambda: 1, open])
def test_trap_25_what_would_not_load_is_refused(tmp_path, value):
    _, optimizer = make()
    checkpoints = Checkpoints(tmp_path)
    good = checkpoints.save(optimizer.guard, 1)
    with pytest.raises(ValueError, match="a checkpoint must hold plain data"):
        Checkpoints(tmp_path, state={"part": Part(value)}).save(optimizer.guard, 2)
    assert names(checkpoints) == [good.name]


def test_a_wrapped_model_is_saved_without_its_wrapper(tmp_path):
    model = nn.DataParallel(nn.Linear(2, 2))
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    path = Checkpoints(tmp_path).save(optimizer, 1)  # the optimizer stands for its guard
    assert list(torch.load(path, weights_only=True)["model"]) == ["weight", "bias"]
    assert Checkpoints(tmp_path).load(optimizer) == 1


def test_a_step_of_a_future_that_was_left_is_in_the_way(tmp_path):
    _, optimizer = make()
    checkpoints = Checkpoints(tmp_path)
    for step in (100, 200):
        checkpoints.save(optimizer.guard, step)
    assert checkpoints.load(optimizer.guard, tmp_path / "step-00000100.pt") == 100
    with pytest.raises(ValueError, match=r"`step` must not be below a step in the folder, got 150 with .*200"):
        checkpoints.save(optimizer.guard, 150)
    assert [c.step for c in checkpoints.all()] == [100, 200]


def test_what_the_guard_cannot_give(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="`guard` must know the model"):
        Checkpoints(tmp_path).save(optimizer.guard, 1)
    checkpoints = Checkpoints(tmp_path, state={"model": model})
    checkpoints.save(optimizer.guard, 1)
    kept = model.weight.detach().clone()
    model.weight.data.zero_()
    assert checkpoints.load(optimizer.guard) == 1 and torch.equal(model.weight, kept)
    with pytest.raises(fastguard.NotGuardedError):
        checkpoints.save(torch.optim.SGD(model.parameters(), lr=0.1), 2)


def test_what_is_missing_or_forgotten_is_said_before_anything_is_loaded(tmp_path):
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    Checkpoints(tmp_path, state={"scheduler": scheduler}).save(optimizer.guard, 1)
    with pytest.warns(UserWarning, match=r"step-00000001.pt also holds scheduler, which `state` does not name"):
        Checkpoints(tmp_path).load(optimizer.guard)
    model[0].weight.data.zero_()
    with pytest.raises(ValueError, match="lacks average"):
        Checkpoints(tmp_path, state={"scheduler": scheduler, "average": model}).load(optimizer.guard)
    assert not model[0].weight.any()
    path = tmp_path / "step-00000001.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"step-00000001.pt cannot be read: .*Move it away"):
        Checkpoints(tmp_path).load(optimizer.guard)
    torch.save({"model": {}}, path)
    with pytest.raises(ValueError, match="must be a file that Checkpoints"):
        Checkpoints(tmp_path).load(optimizer.guard)
    with pytest.raises(FileNotFoundError):
        Checkpoints(tmp_path).load(optimizer.guard, tmp_path / "nothing.pt")


def everything(model, optimizer):
    """All that `load` may change."""
    guard = optimizer.guard
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "torch": torch.get_rng_state()}
    return copy.deepcopy({**parts, "guard": guard.state_dict(), "step": guard._run.step, "python": random.getstate()})


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyError("no"), TypeError("no")], ids=repr)
def test_a_part_that_refuses_leaves_all_parts_as_they_were(tmp_path, error):
    def load(state):
        fastguard.EarlyStopping.load_state_dict(part, state)
        if part.num_checks == 7:
            raise error

    model, optimizer = make()
    part = fastguard.EarlyStopping(1)
    part.load_state_dict, part.num_checks = load, 7
    checkpoints = Checkpoints(tmp_path, state={"part": part})
    checkpoints.save(optimizer.guard, 1)
    part.num_checks = 3
    for _ in range(3):
        take_step(model, optimizer)
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError if type(error) is RuntimeError else ValueError, match="no"):
        checkpoints.load(optimizer.guard)
    assert is_identical(everything(model, optimizer), before) and part.num_checks == 3
    other = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))  # its first layer would load
    wrapped = fastguard.wrap(torch.optim.AdamW(other.parameters()), other)
    before = everything(other, wrapped)
    with pytest.raises(RuntimeError, match="Error"):
        checkpoints.load(wrapped.guard)
    assert is_identical(everything(other, wrapped), before)


def test_damage_is_told_by_checksums_before_anything_is_loaded(tmp_path):
    model, optimizer = make()
    take_step(model, optimizer)
    torch.serialization.set_crc32_options(False)
    path = Checkpoints(tmp_path).save(optimizer.guard, 1)
    assert not torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    whole, good = path.read_bytes(), {name: p.clone() for name, p in model.state_dict().items()}
    weights = whole.index(model[0].weight.detach().numpy().tobytes())
    order = random.Random(1)
    places = [weights + 5, *(order.randrange(len(whole)) for _ in range(40))]
    refused = 0
    for place in places:
        raw = bytearray(whole)
        raw[place] ^= 1 << order.randrange(8)
        path.write_bytes(raw)
        take_step(model, optimizer)
        before = everything(model, optimizer)
        try:
            assert Checkpoints(tmp_path).load(optimizer.guard) == 1  # padding, say
            assert is_identical(dict(model.state_dict()), good), place
        except ValueError:
            refused += 1
            assert is_identical(everything(model, optimizer), before), place
        assert refused, "the flipped bit of a weight was loaded"
    assert refused > 20
    contents = torch.load(io.BytesIO(whole), weights_only=True)
    for key in ("step", "model", "optimizers", "guard", "state", "random"):
        for wrong in ({k: v for k, v in contents.items() if k != key}, {**contents, key: [1]}):
            torch.save(wrong, path)
            before = everything(model, optimizer)
            with pytest.raises(ValueError, match=r"must be a file that|does not suit this run"):
                Checkpoints(tmp_path).load(optimizer.guard)
            assert is_identical(everything(model, optimizer), before)


def test_wrong_settings_state_steps_and_metrics(tmp_path):
    _, optimizer = make()
    for settings, message in (
        ({"keep_last": 0}, "`keep_last` must be an integer >= 1, got 0"),
        ({"keep_best": -1}, "`keep_best` must be an integer >= 0, got -1"),
        ({"mode": "low"}, "`mode` must be 'min' or 'max', got 'low'"),
    ):
        with pytest.raises(ValueError, match=message):
            Checkpoints(tmp_path, **settings)
    with pytest.raises(TypeError, match=r"`state` must hold objects with state_dict and .*, got int - at 'a"):
        Checkpoints(tmp_path, state={"a": 1})
    for step in (-1, 1.5, True):
        with pytest.raises(ValueError, match="`step` must be an integer >= 0"):
            Checkpoints(tmp_path).save(optimizer.guard, step)
    with pytest.raises(ValueError, match="`metric` must be a"):
        Checkpoints(tmp_path).save(optimizer.guard, 1, metric="low")


@pytest.mark.usefixtures("one_process")
def test_shards_and_several_processes_are_sent_elsewhere(tmp_path, monkeypatch):
    _, optimizer = make()
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    model = nn.Linear(4, 4)
    plain = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    with pytest.raises(TypeError, match=r"got a DTensor - at 'weight'.*torch\.distributed\.checkpoint"):
        Checkpoints(tmp_path).save(plain.guard, 1)
    assert Checkpoints(tmp_path).save(optimizer.guard, 1).exists()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match=r"a single process, got one of several.*torch\.distributed\.checkpoint"):
        Checkpoints(tmp_path).save(optimizer.guard, 1)
