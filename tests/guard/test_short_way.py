"""A step that goes the short way, one call, is the one of the long way, and its line in a log that of its record."""

import copy
import json
import math
import random
import signal
import struct

import pytest
import torch
from guard_helpers import loss_at, make_model, poison, take_step
from torch import nn

import fastguard
from fastguard.kernels import backends, cpu
from fastguard.records import strict_json
from fastguard.records.samples import WeightStats
from fastguard.records.slot import LOSS_SCALE
from fastguard.sinks import flatten
from fastguard.step.hooks import Hooks
from fastguard.step.ring import JudgedStep, Ring

pytestmark = pytest.mark.skipif(not backends()["cpu"].available, reason=str(backends()["cpu"].reason))


def _guarded(model, **settings):
    fused = settings.pop("fused", False)
    return fastguard.wrap(torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused), model, **settings)


@pytest.fixture
def never_short(monkeypatch):
    """Sends the steps of a guard the long way."""

    def apply(optimizer):
        for hooks in optimizer.guard._hooks:
            hooks._may_be_short = False
        optimizer.guard._run.is_short = False

    return apply


def _plain(record):
    values = (record.step, record.norm, record.clip_coef, record.skipped, record.loss, record.lr, record.loss_scale)
    return (*map(repr, values), record.tensors.names, bytes(record.tensors.table))


@pytest.mark.thinned(n=5)
@pytest.mark.parametrize("max_norm", [None, 0.05, 1e9])
@pytest.mark.parametrize("skip_nonfinite", [True, False])
@pytest.mark.parametrize("fused", [False, True])
def test_both_ways_leave_the_same(max_norm, skip_nonfinite, fused, never_short):
    model = make_model()
    models, memories = [model, copy.deepcopy(model)], [fastguard.MemorySink(), fastguard.MemorySink()]
    short, long = (
        _guarded(m, max_norm=max_norm, skip_nonfinite=skip_nonfinite, sinks=[memory], fused=fused)
        for m, memory in zip(models, memories, strict=True)
    )
    never_short(long)
    ways = []
    for step in range(40):
        for m, optimizer in zip(models, (short, long), strict=True):
            optimizer.zero_grad()
            loss = loss_at(m, step)
            loss.backward()
            if step % 11 == 7:
                poison(m, math.inf if step % 2 else math.nan, index=step % 4)
            if step % 9 == 4:  # a parameter without a gradient, in the middle
                list(m.parameters())[1].grad = None
            optimizer.step()
            optimizer.guard.observe(loss=float(loss.detach()))
        ways.append((short.guard._run.is_short, long.guard._run.is_short))
        assert _plain(short.guard.last) == _plain(long.guard.last)
    assert set(ways) == {(True, False)}
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    short.guard.flush(), long.guard.flush()
    first, second = (list(map(_plain, memory.records)) for memory in memories)
    assert first == second and len(first) == 40


def test_a_closure_of_none_is_none(monkeypatch):
    model = make_model()
    optimizer = _guarded(model, max_norm=0.05)
    take_step(model, optimizer, 0)
    ways = []
    long = Hooks._go_the_long_way
    monkeypatch.setattr(Hooks, "_go_the_long_way", lambda self, *rest: (ways.append(1), long(self, *rest))[1])
    for step in range(1, 6):
        optimizer.zero_grad()
        loss_at(model, step).backward()
        if step == 3:
            poison(model)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step(None)
        assert all(map(torch.equal, before, model.parameters())) is optimizer.guard.last.skipped is (step == 3)
    assert not ways
    optimizer.step(lambda: loss_at(model, 6))
    assert ways


LOOKS = {
    "history": lambda guard: guard.history,
    "report": lambda guard: guard.report(),
    "state": lambda guard: guard.state_dict(),
    "last": lambda guard: guard.last,
    "observe": lambda guard: guard.observe(loss=1.0),
    "nothing": lambda guard: None,
}


@pytest.mark.thinned(n=5)
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("skip_nonfinite", [True, False])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("bad_step", [41, 43])  # with several steps before it that are not delivered
def test_a_bad_step_that_is_looked_at_is_not_forgotten(look, skip_nonfinite, log, bad_step, tmp_path):
    """Whoever asks for the history delivers what is before the step, and must not let it pass for a clean one."""
    model = make_model()
    path = tmp_path / "run.jsonl"
    sinks = [fastguard.JsonlSink(path)] if log else []
    optimizer = _guarded(model, max_norm=1.0, skip_nonfinite=skip_nonfinite, sinks=sinks)
    guard = optimizer.guard
    for step in range(60):
        if not skip_nonfinite and step > bad_step:
            for p in model.parameters():  # which the bad step has ruined
                p.data = p.data.nan_to_num()
            optimizer.state.clear()
        take_step(model, optimizer, step, bad=math.nan if step == bad_step else None, bad_index=1)
        if step == bad_step:
            look(guard)
            look(guard)
    guard.close()
    assert (guard.history.num_nonfinite, guard.history.num_steps) == (1, 60)
    assert guard.history.num_skipped == skip_nonfinite
    (event,) = guard.history.last_events
    assert (event.step, event.names, event.num_nans) == (bad_step, ("0.bias",), 1)
    assert any(finding.rule == "non-finite-gradients" for finding in guard.report().findings)
    if log:
        line = next(line for line in fastguard.sinks.read_jsonl(path) if line["step"] == bad_step)
        assert line["nonfinite"] == ["0.bias"] and len(line["tensors"]) == 4


def test_a_step_that_turns_out_odd_loses_none_before_it():
    """Its gradients were being measured over the table of the one before, which nobody had looked at yet."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    norms = []
    for step in range(30):
        take_step(model, optimizer, step)
        norms.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters())))
    guard = optimizer.guard
    assert guard._run.is_short and guard._run.ring.num_open > 1
    list(model.parameters())[-1].grad = torch.ones(4).to_sparse()
    optimizer.step()
    assert guard.last.step == 30 and len(guard.last.tensors) == 4
    take_step(model, optimizer, 31)
    guard.flush()
    assert [entry.step for entry in guard.history.recent] == list(range(32))
    assert [entry.norm for entry in guard.history.recent][:30] == pytest.approx(norms, rel=1e-6)


def test_a_step_that_cannot_be_measured_at_all_leaves_no_wrong_record():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(30):
        take_step(model, optimizer, step)
    p = nn.Parameter(torch.zeros(3, device="meta"))
    p.grad = torch.zeros(3, device="meta")
    optimizer.param_groups[0]["params"].append(p)
    with pytest.raises(fastguard.UnsupportedTensorError):
        optimizer.step()
    assert optimizer.guard.last is None  # rather than one with another step's rows
    optimizer.param_groups[0]["params"].pop()
    take_step(model, optimizer, 30)
    assert optimizer.guard.last.step == 30 and len(optimizer.guard.last.tensors) == 4
    assert optimizer.guard.history.num_steps == 30


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("accumulated", [False, True])
def test_a_fused_optimizer_on_the_cpu_may_divide(cls, accumulated):
    model = make_model(dtype=torch.float64)
    plain = copy.deepcopy(model)
    optimizer = fastguard.wrap(
        cls(model.parameters(), lr=0.1, fused=True), model, max_norm=0.05, clip_through="grad_scale"
    )
    rival = cls(plain.parameters(), lr=0.1, fused=True)
    for step in range(6):
        for m, o in ((model, optimizer), (plain, rival)):
            if not accumulated:
                o.zero_grad()
            loss_at(m, step).backward()
            if o is rival:
                torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05)
            o.step()
        assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
        assert optimizer.guard.last.clipped
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # the factor is rounded to float32
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-9)  # written back, as torch's clipping does


def test_the_coefficient_is_that_of_the_formula_to_the_bit():
    headers, found = bytearray(128), [bytearray(), *[None] * 5]
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        p = nn.Parameter(torch.zeros(5))
        p.grad = torch.randn(5, generator=generator) * 10.0 ** (seed % 60 - 30)
        limit = 10.0 ** (seed % 7 - 3)
        row = fastguard.tensor_stats([p.grad])[0]
        outcome = cpu.take_step([{"params": [p]}], headers, 0, found, seed, 1, limit, True, True)
        _, norm, coefficient, factor, *rest = struct.unpack("16d", headers)
        assert norm == row.norm
        assert coefficient == factor == min(1.0, limit / (norm + 1e-6))
        assert bool(outcome & 8) is (coefficient != 1.0) and rest[2] == seed


@pytest.mark.parametrize("groups", [(), [()], [{}], [{"params": ()}], [{"params": None}], None, [{"params": [3]}]])
def test_groups_of_another_kind_are_odd(groups):
    headers, found = bytearray(128), [bytearray(), *[None] * 5]
    try:
        assert cpu.take_step(groups, headers, 0, found, 0, 1, 1.0, True, True) == 1
    except AttributeError:
        assert groups == [{"params": [3]}]  # what has no `.grad` is no parameter
    assert bytes(headers) == bytes(128)


def test_samples_of_a_step_that_was_dropped_go_to_the_next_record():
    optimizer = _guarded(make_model())
    ring = optimizer.guard._run.ring
    for step, name in enumerate("de"):
        ring.attach(step, weights=(WeightStats(name, 4, 1.0, 0.5, 0.7),))
    ring.arrive(JudgedStep(3, bytearray(), None, (), 1.0))
    assert [found.name for found in optimizer.guard.last.weights] == ["e"]
    optimizer.guard.flush()
    assert not ring.samples


def _logged(model, sinks, **settings):
    return fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, sinks=sinks, **settings)


TENSORS = {
    "ordinary": [torch.randn(7, 3), torch.randn(5)],
    "zeros": [torch.zeros(4)],
    "none": [],
    "empty": [torch.zeros(0)],
    "tiny": [torch.full((3,), 1e-30)],
    "huge": [torch.full((3,), 3e38)],
    "round": [torch.full((100,), 1000.0), torch.ones(1)],
}


@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("loss", [None, 0.1, 2.0, 1e-5, 1e16, math.nan, math.inf, -math.inf])
def test_the_text_is_that_of_json(tensors, loss):
    ring = Ring()
    stats = fastguard.tensor_stats(tensors)
    table = bytearray(stats.table)
    judged = JudgedStep(12, table, None, (), stats.total_norm(), 0.25, loss_scale=1024.0 if loss == 2.0 else None)
    ring.arrive(judged)
    for name, value in (("loss", loss), ("val_loss", None if loss is None else 3.0), ("lr", 1e-3)):
        ring.note(name, value)
    flat = flatten(ring.latest())
    flat.pop("nonfinite", None)
    expected = strict_json.dumps({"step": flat.pop("step"), "time": 1.5, **flat}).encode() + b"\n"
    assert cpu.json_line(ring.headers, ring.newest, table, 1.5) == expected
    assert ring.words[LOSS_SCALE] == (1024.0 if loss == 2.0 else 1.0)


def test_numbers_are_written_as_python_writes_them():
    """Any bits, powers of ten on either side of where an exponent is written, integers, halves."""
    generator = random.Random(7)
    values = [struct.unpack("d", generator.randbytes(8))[0] for _ in range(3000)]
    values += [sign * 10.0**k for k in range(-324, 309) for sign in (1, -1)]
    values += [0.0, -0.0, 5e-324, 1.7976931348623157e308, 123456789012345680.0, 9999999999999998.0]
    values += [float(k) for k in range(-50, 50)] + [k + 0.5 for k in range(50)]
    values += [generator.uniform(-1, 1) * 10.0 ** generator.randint(-6, 18) for _ in range(3000)]
    ring = Ring()
    ring.arrive(JudgedStep(0, bytearray(), None, (), 1.0))
    for value in values:
        ring.note("loss", value)
        text = cpu.json_line(ring.headers, ring.newest, bytearray(), 0.0).decode()
        assert json.loads(text)["loss"] == strict_json.loads(strict_json.dumps(value))
        assert f'"loss":{strict_json.dumps(value)},' in text


def test_a_log_is_the_same_whether_steps_go_as_lines_or_as_records(tmp_path):
    class Recording(fastguard.JsonlSink):
        """With a `write` of its own, which has to be called."""

        def write(self, record):
            super().write(record)

    logs = []
    for kind in (fastguard.JsonlSink, Recording):
        model = make_model()
        path = tmp_path / f"{kind.__name__}.jsonl"
        optimizer = _logged(model, [kind(path, tensors_every=7)], max_norm=0.3, weights=10)
        assert optimizer.guard._ledger.writes_lines is (kind is fastguard.JsonlSink)
        for step in range(60):
            take_step(model, optimizer, step, bad=math.nan if step in (20, 21) else None)
            optimizer.guard.observe(loss=1.0 / (step + 1), val_loss=2.0 if step % 9 == 0 else None)
            if step == 33:
                assert optimizer.guard.last.step == optimizer.guard.report().numbers["num_steps"] - 1
            if step == 40:
                optimizer.guard.flush()
        optimizer.guard.close()
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line.pop("time")
        logs.append(lines)
    first, second = ([line for line in log if "step" in line] for log in logs)
    assert [line["step"] for line in first] == list(range(60))
    assert first == second
    # Facts about the model are noted when the rules look ahead, which is one step earlier where records are delivered.
    notes, same = ({**dict(item for line in log for item in line.get("model", {}).items())} for log in logs)
    assert notes.pop("run_id") != same.pop("run_id")
    assert notes == same and notes["num_seen"] == 4


def test_a_disk_that_is_full_in_the_middle_of_a_line_costs_that_line_alone(tmp_path):
    """A limit on the size of files cuts the write off, as a full disk does."""
    resource = pytest.importorskip("resource", reason="no limits on this system")
    path, model = tmp_path / "run.jsonl", make_model()
    optimizer = _logged(model, [fastguard.JsonlSink(path, tensors_every=0)])
    for step in range(5):
        take_step(model, optimizer, step)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    try:
        with pytest.warns(RuntimeWarning, match="could not write a record: OSError"):
            take_step(model, optimizer, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, before)
    for step in range(6, 12):
        take_step(model, optimizer, step)
    optimizer.guard.close()
    log = fastguard.sinks.read_jsonl(path)
    assert [line["step"] for line in log if "step" in line] == [step for step in range(12) if step != 4]
    assert len(log.skipped_lines) == 1 and optimizer.guard._ledger.lost() == {f"JsonlSink({str(path)!r})": 1}
