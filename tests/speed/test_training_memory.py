"""What guarding takes of memory: nothing of a step outlives it, no look copies what it looks at."""

import gc
import json
import sys
import tracemalloc
import weakref
from contextlib import contextmanager

import pytest
import torch
from guard_helpers import Allocations
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

pytest.importorskip("benchmarks.speed", reason="the benchmarks are not beside these tests", exc_type=ImportError)

import fastguard
from benchmarks.speed import memory, training_memory
from benchmarks.speed.cases import CASES
from fastguard.observers import batch_sample
from fastguard.observers.activations import ActivationMonitor
from fastguard.observers.batches import NormStatistics
from fastguard.observers.weights import WeightSampler
from fastguard.records.failures import Failures

MIB = 1 << 20


class _Witness:
    """Lives as long as the graph that holds it."""


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, witness):
        ctx.witness = witness
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@pytest.mark.parametrize("settings", [{}, {"activations": {"every": 1, "overhead_budget": None}, "weights": 1}])
def test_nothing_of_a_step_outlives_it(settings):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters()), model, max_norm=1.0, **settings)

    def step():
        x, targets, witness = torch.randn(16, 3, 8, 8), torch.randint(5, (16,)), _Witness()
        output = model(x)
        loss = F.cross_entropy(_Through.apply(output, witness), targets)
        loss.backward()
        optimizer.step()
        optimizer.guard.observe(loss=loss)
        gone = [x, targets, output, loss, *(p.grad for p in model.parameters())]
        held = [StorageWeakRef(tensor.untyped_storage()) for tensor in gone]
        optimizer.zero_grad()
        return held, weakref.ref(witness)

    gc.collect()
    gc.disable()  # what hangs in a cycle lives on for an unknown time
    try:
        for number in range(45):  # the first passes, each twentieth, and BatchNorm's after the 42nd
            held, witness = step()
            assert [ref.expired() for ref in held] == [True] * len(held), number
            assert witness() is None, number
    finally:
        gc.enable()


@contextmanager
def at_most(num_bytes):
    with Allocations() as seen:
        yield
    assert seen.largest <= num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_look_copies_what_it_looks_at(dtype):
    x = torch.randn(4, 64, 128, 128).to(dtype)  # 16 MiB in float32
    norm = nn.BatchNorm2d(64)
    norms = NormStatistics(norm, Failures())
    with at_most(MIB):
        batch_sample.figures_of(x)
        norms.compare("", norm, x)
    assert norms.found


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_an_output_that_is_not_finite_is_not_copied(bad):
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    x = torch.zeros(4, 16, 128, 128).transpose(1, 3)
    x[-1, -1, -1, -1] = bad
    output = x * 2.0
    monitor = ActivationMonitor(model, modules="all", every=1, overhead_budget=None)
    for hook in monitor._pass_hooks:
        hook.remove()
    (hook,) = [hook for hook in monitor._hooks if hook.target.name == "1"]
    with at_most(MIB):
        hook.collector.see(hook.target, [("", output)], None)
    monitor.detach()


def _decaying(params):
    return torch.optim.SGD(params, lr=0.1, weight_decay=0.1)


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.AdamW, _decaying])
def test_no_sample_of_the_weights_copies_them(make):
    weights = nn.Parameter(torch.randn(256, 64, 64).transpose(0, 2))  # 4 MiB
    optimizer, sampler = make([weights]), WeightSampler(every=1)
    for _ in range(2):
        weights.grad = torch.randn(64, 64, 256)
        with at_most(MIB):
            sample = sampler.before(optimizer)
        optimizer.step()
        with at_most(MIB):
            (found,) = sampler.after(sample, names=["w"])
    assert found.update_norm is not None and found.update_norm > 0.0


@pytest.mark.parametrize("has_model", [False, True])
def test_ten_thousand_tensors_take_two_and_a_half_megabytes(has_model):
    memory.clip_bytes(CASES["1000x1"])  # has all modules imported
    model = nn.ModuleList([nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(10_000)])])
    params = list(model.parameters())
    for p in params:
        p.grad = torch.rand(1)
    optimizer = memory.Nothing(params)
    tracemalloc.start()
    try:
        fastguard.wrap(optimizer, model if has_model else None, max_norm=1e30)
        for _ in range(50):
            optimizer.step()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert optimizer.guard.history.last.tensors.names[0] == ("0.0" if has_model else "group0.param0")
    assert peak < 2.5e6


def test_the_readme_says_what_was_measured():
    if not training_memory.README.exists():
        pytest.skip("the README is not beside these tests")
    results = json.loads(training_memory.RESULTS.read_text(encoding="utf-8"))
    text = training_memory.README.read_text(encoding="utf-8")
    assert training_memory.written(text, results) == text
    assert max(max(found["ratio"].values()) for found in results["trainings"].values()) <= training_memory.AT_MOST


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is read from /proc")
@pytest.mark.parametrize("name", training_memory.TRAININGS)
def test_the_peak_of_a_training_hardly_grows(name):
    found = training_memory.measure(name)
    assert {mode: ratio for mode, ratio in found["ratio"].items() if ratio > training_memory.AT_MOST} == {}
