"""Which forward passes are looked at, and how the hook that does so stays out of everybody's way."""

import copy
import pickle
import warnings
from collections import OrderedDict

import pytest
import torch
import torch._dynamo.testing
from guard_helpers import assert_identical, guarded_model, make_model, needs_extension, snapshot, take_step, train
from torch import nn

import fastguard
from fastguard.diagnosis import by_sign
from fastguard.kernels import cpu
from fastguard.observers.batches import can_be_quiet

pytestmark = needs_extension


def guarded(model, **settings):
    return fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, **settings)


def batches_of(optimizer):
    optimizer.guard.flush()
    return list(optimizer.guard.history.batches)


def step(model, optimizer, x, num_passes=1):
    optimizer.zero_grad()
    for _ in range(num_passes):
        model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("num_passes", [1, 3])
def test_the_first_three_then_one_in_twenty(num_passes):
    model, x = make_model(), torch.randn(5, 6)
    optimizer = guarded(model)
    for _ in range(70):
        step(model, optimizer, x, num_passes)
    steps = [at for at, _ in batches_of(optimizer)]
    assert steps == ([0, 1, 2, 22, 42, 62] if num_passes == 1 else [0, 0, 0, 20, 40, 60])
    assert all(batch.training and batch.with_grad for _, batch in batches_of(optimizer))


def test_the_first_pass_of_an_evaluation_is_looked_at_and_no_other():
    model, x = make_model(), torch.randn(5, 6)
    optimizer = guarded(model)
    for number in range(60):
        step(model, optimizer, x)
        if number % 10 == 9:
            model.eval()
            with torch.no_grad():
                for _ in range(4):
                    model(x + 1)
            model.train()
    seen = [(at, batch.with_grad) for at, batch in batches_of(optimizer) if not batch.training]
    assert seen == [(10, False), (30, False), (50, False)]  # with the record of the step after; once in twenty


def test_passes_while_paused_or_detached_are_not_looked_at():
    model, x = make_model(), torch.randn(5, 6)
    optimizer = guarded(model)
    with optimizer.guard.paused():
        step(model, optimizer, x)
    assert not batches_of(optimizer)
    step(model, optimizer, x)
    assert len(batches_of(optimizer)) == 1
    optimizer.guard.detach()
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert not any(m._forward_hooks for m in model.modules())


def test_they_come_with_the_record_of_their_step_and_into_the_log(tmp_path):
    model, x = make_model(), torch.randn(5, 6)
    memory = fastguard.MemorySink()
    optimizer = guarded(model, sinks=[memory, fastguard.JsonlSink(tmp_path / "run.jsonl")], max_norm=1e9)
    for _ in range(45):
        step(model, optimizer, x)
    with torch.no_grad():
        model(x)  # after the last step: with that one's record
    optimizer.guard.close()
    assert [record.step for record in memory.records if record.batches] == [0, 1, 2, 22, 42, 44]
    read = fastguard.TrainingHistory.from_jsonl(tmp_path / "run.jsonl")
    assert list(read.batches) == list(optimizer.guard.history.batches)
    assert list(read.grad_cosines) == list(optimizer.guard.history.grad_cosines) and len(read.grad_cosines) == 20
    assert read.model == optimizer.guard.history.model


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.unused = nn.Sigmoid()
        self.out, self.inner, self.act = nn.Linear(8, 4), nn.Linear(6, 8), nn.ReLU()

    def forward(self, x):
        return self.out(self.act(self.inner(x))).softmax(-1)


def test_the_last_modules_and_operations_of_the_first_pass():
    model = Functional()
    optimizer = guarded(model)
    take_step(model, optimizer, 0)
    notes = optimizer.guard.report() and optimizer.guard.history.model
    assert notes.last_modules == ("Linear", "ReLU", "Linear")
    assert notes.last_operations == ("Softmax", "Addmm", "Relu")
    assert notes.autocast == ""
    assert not any(m._forward_pre_hooks for m in model.modules())
    alone = nn.Linear(6, 4)
    optimizer = guarded(alone)
    take_step(alone, optimizer, 0)
    assert optimizer.guard.report() and optimizer.guard.history.model.last_modules == ("Linear",)


class CutOff(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.out, self.unused = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(2, 2)

    def forward(self, x):
        return self.out(self.first(x).detach())


def test_what_is_called_and_has_no_gradient_is_cut_off():
    model = CutOff()
    optimizer = guarded(model)
    for step in range(30):
        take_step(model, optimizer, step)
    assert optimizer.guard.report() and optimizer.guard.history.model.learning_modules == ("first", "out")
    found = by_sign(optimizer.guard.report().findings)["missing-gradients"]
    assert (found.severity, found.layers) == ("warning", ("first.weight", "first.bias"))


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_is_seen_around_the_model_and_inside(inside):
    model = make_model()
    if inside:
        model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    optimizer = guarded(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
        model(torch.ones(2, 6)).float().sum().backward()
    optimizer.step()
    assert optimizer.guard.report() and optimizer.guard.history.model.autocast == "bfloat16"


def test_a_first_pass_that_raises_leaves_no_hooks_for_long():
    model, optimizer = guarded_model()
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    take_step(model, optimizer, 0)
    assert not any(m._forward_hooks for m in model.modules() if m is not model)
    assert optimizer.guard.report() and optimizer.guard.history.model.last_modules == ("Linear", "Tanh", "Linear")


def test_copies_and_files_of_a_model_have_no_hooks_that_do_anything():
    model, optimizer = guarded_model()
    twin, read = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert b"fastguard" not in pickle.dumps(model)  # so that it can be read where there is none
    for one in (twin, read):
        one(torch.ones(2, 6))
    assert not batches_of(optimizer)


@pytest.mark.parametrize("when", ["before", "after", "in place"])
def test_compiled_models_are_whole_graphs_and_train_as_ever(when):
    plain = make_model()
    model = copy.deepcopy(plain)
    compiled = model
    if when == "before":
        compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = guarded(compiled)
    if when == "after":
        compiled = torch.compile(model, backend="eager", fullgraph=True)
    elif when == "in place":
        model.compile(backend="eager", fullgraph=True)
    train(compiled, optimizer, range(4))
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.01), range(4))
    assert_identical(snapshot(model), snapshot(plain))
    assert len(batches_of(optimizer)) in ((3,) if when == "before" else (0, 3))
    assert not len(optimizer.guard._run.failures)


def test_scripted_and_traced_models():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.script(make_model())
        optimizer = guarded(model)
        take_step(model, optimizer, 0)
        assert not batches_of(optimizer) and not len(optimizer.guard._run.failures)  # they take no hooks
        mixed = nn.Sequential(model, nn.Linear(4, 4))
        optimizer = guarded(mixed)
        take_step(mixed, optimizer, 0)
        assert len(batches_of(optimizer)) == 1 and not len(optimizer.guard._run.failures)
        assert optimizer.guard.history.model.module_kinds == {"Linear": 3, "Tanh": 1}
        plain = make_model()
        optimizer = guarded(plain)
        torch.jit.trace(plain, torch.ones(2, 6))
        with pytest.raises(AttributeError, match=r"hooks that cannot be scripted: call `guard.detach\(\)` before"):
            torch.jit.script(plain)
        optimizer.guard.detach()
        torch.jit.script(plain)


def test_transforms_and_recomputation_are_left_alone():
    model, optimizer = guarded_model()
    params = dict(model.named_parameters())
    x = torch.ones(3, 6)
    torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(params)
    torch.func.vmap(lambda one: torch.func.functional_call(model, params, (one,)))(x)
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    optimizer.step()
    found = batches_of(optimizer)
    assert len(found) == 1 and found[0][1].with_grad and not len(optimizer.guard._run.failures)


_IS_QUIET = cpu.extension is not None and can_be_quiet(nn.Identity())
_QUIET = pytest.mark.skipif(not _IS_QUIET, reason="not without the extension, nor with this torch")


@_QUIET
def test_hooks_of_others_are_seen_whenever_they_came():
    model, x = make_model(), torch.randn(5, 6)
    seen = []
    before = model.register_forward_hook(lambda module, args, output: seen.append("before"))
    optimizer = guarded(model)
    assert type(model._forward_hooks) is OrderedDict  # its handle knows this one
    before.remove()
    step(model, optimizer, x)
    optimizer.guard.detach()
    optimizer = guarded(model)
    assert type(model._forward_hooks) is not OrderedDict
    after = model.register_forward_hook(lambda module, args, output: seen.append("after"))
    optimizer.guard.detach()
    for _ in range(2):
        model(x)
    after.remove()
    model(x)
    assert seen == ["after"] * 2
    twin = copy.deepcopy(model)
    assert type(twin._forward_hooks) is OrderedDict and not twin._forward_hooks


def test_a_model_within_a_compiled_function_is_one_graph():
    model, x = make_model(), torch.randn(5, 6)
    optimizer = guarded(model)
    counter = torch._dynamo.testing.CompileCounter()
    run = torch.compile(lambda x: model(x).square().mean(), backend=counter, fullgraph=True)
    for _ in range(30):
        run(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert counter.frame_count == 1 and not len(optimizer.guard._run.failures)
    before = len(batches_of(optimizer))
    model(x).sum().backward()
    optimizer.step()
    assert len(batches_of(optimizer)) == before + 1
