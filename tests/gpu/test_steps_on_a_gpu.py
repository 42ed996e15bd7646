"""Guarded steps on a real device: nothing waits, nothing is allocated, skips and clips are what they are on the CPU."""

import copy
import math
import subprocess
import sys
import textwrap

import pytest
import torch
from gpu_helpers import FUSED, OTHERS, backward, batches, make_model, same_bits, snapshot

import fastguard

pytestmark = pytest.mark.gpu
NUM_STEPS = 40  # more than there are slots
every_fused = pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
every_one = pytest.mark.parametrize("make", [*FUSED.values(), *OTHERS.values()], ids=[*FUSED, *OTHERS])


@every_fused
@pytest.mark.parametrize("clip_through", ["scale", "grad_scale"])
@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_no_step_waits(make, clip_through, max_norm, device, backend, no_sync):
    model, memory = make_model(device), fastguard.MemorySink()
    optimizer = fastguard.wrap(
        make(model.parameters()), model, max_norm=max_norm, clip_through=clip_through, backend=backend, sinks=[memory]
    )
    data = batches(device, NUM_STEPS)
    backward(model, data[0])
    optimizer.step()  # makes what the steady state needs
    for step in range(1, NUM_STEPS):
        loss = backward(model, data[step], bad=math.nan if step == 7 else None)
        with no_sync():
            optimizer.step()
            optimizer.guard.observe(loss=loss)
    optimizer.guard.flush()
    assert memory.series("step") == list(range(NUM_STEPS))
    assert [r.skipped for r in memory.records] == [step == 7 for step in range(NUM_STEPS)]
    assert memory.records[7].nonfinite == ["0.weight"]
    assert None not in memory.series("loss")[1:]
    assert any(r.clipped for r in memory.records) is (max_norm is not None)


@every_one
@pytest.mark.parametrize("skipped", [(), (0,), (3, 4)])
def test_skipped_steps_never_were(make, skipped, device, backend):
    plain = make_model(device)
    model = copy.deepcopy(plain)
    optimizer, guarded = make(plain.parameters()), fastguard.wrap(make(model.parameters()), model, backend=backend)
    for step, x in enumerate(batches(device, 8)):
        if step not in skipped:
            backward(plain, x)
            optimizer.step()
        backward(model, x, bad=math.inf if step in skipped else None)
        before = snapshot(model, guarded)
        guarded.step()
        assert step not in skipped or step == 0 or same_bits(snapshot(model, guarded), before)
    assert same_bits(snapshot(model, guarded), snapshot(plain, optimizer))
    guarded.guard.flush()
    assert [e.skipped for e in guarded.guard.history.recent] == [step in skipped for step in range(8)]


@every_one
@pytest.mark.parametrize("clip_through", ["scale", "grad_scale"])
def test_clipping_is_torchs(make, clip_through, device, backend):
    plain = make_model(device)
    model = copy.deepcopy(plain)
    optimizer = make(plain.parameters())
    guarded = fastguard.wrap(make(model.parameters()), model, max_norm=0.01, clip_through=clip_through, backend=backend)
    for x in batches(device, 4):
        backward(plain, x)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        optimizer.step()
        backward(model, x)
        guarded.step()
        guarded.guard.flush()
        assert guarded.guard.last.norm == pytest.approx(float(expected), rel=1e-4)
    for got, wanted in zip(snapshot(model, guarded), snapshot(plain, optimizer)):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_a_scaler(fused, unscales, max_norm, device, backend, no_sync):
    """As unguarded, scale for scale and bit for bit; with a fused optimizer nobody waits, the scaler neither."""
    plain = make_model(device)
    model = copy.deepcopy(plain)
    scales = []
    for m, guards in ((plain, False), (model, True)):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.05, fused=fused, foreach=not fused)
        if guards:
            fastguard.wrap(optimizer, m, max_norm=max_norm, backend=backend)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=3)
        scales.append([])
        for step, x in enumerate(batches(device, 8)):
            backward(m, x, bad=math.inf if step == 4 else None, scaler=scaler)
            if unscales or not guards:
                scaler.unscale_(optimizer)
            if not guards and max_norm is not None:
                torch.nn.utils.clip_grad_norm_(m.parameters(), max_norm)
            if guards and fused and step:
                with no_sync():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
            scales[-1].append(scaler.get_scale())
    assert scales[0] == scales[1]
    guard = optimizer.guard
    guard.flush()
    assert [e.skipped for e in guard.history.recent] == [step == 4 for step in range(8)]
    assert [e.loss_scale is None for e in guard.history.recent] == [unscales] * 8
    for a, b in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("clip_through", ["scale", "grad_scale"])
def test_the_steady_state_allocates_nothing(clip_through, device):
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fastguard.wrap(optimizer, model, max_norm=0.01, clip_through=clip_through)
    attachment = optimizer.guard._hooks[0]
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    loss = torch.ones((), device=device)
    for step in range(NUM_STEPS):
        if step == 20:
            torch.cuda.synchronize()
            allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        attachment._before(optimizer, (optimizer,), {})
        optimizer.guard.observe(loss=loss)
        attachment._after(optimizer, (optimizer,), {})
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated


@pytest.mark.parametrize(("max_norm", "launches"), [(None, 2), (0.01, 3)])
def test_launches(max_norm, launches, device):
    """Two whatever the number of tensors, and one more to scale."""
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(100, device=device)) for _ in range(300))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fastguard.wrap(optimizer, model, max_norm=max_norm)
    for p in model:
        p.grad = torch.randn_like(p)
    optimizer.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    ours = [name for name in names if name in ("stats_kernel", "finalise_kernel", "scale_kernel")]
    assert len(ours) == launches, names


def test_others_wait_once_or_not_at_all(device, backend, no_sync):
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
    fastguard.wrap(optimizer, model, max_norm=0.01, skip_nonfinite=False, backend=backend)
    data = batches(device, 4)
    for step, x in enumerate(data):
        backward(model, x)
        if not step:
            optimizer.step()
            continue
        with no_sync():
            optimizer.step()
    optimizer.guard.skip_nonfinite = True
    backward(model, data[0])
    with pytest.raises(RuntimeError, match="synchroniz"), no_sync():
        optimizer.step()


def test_the_newest_record_lags_and_flush_waits(device, backend):
    model = make_model(device)
    optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters(), fused=True), model, backend=backend)
    data = batches(device, 6)
    assert (optimizer.guard.last, optimizer.guard.lag) == (None, 0)
    for step, x in enumerate(data):
        backward(model, x)
        optimizer.step()
        assert 1 <= optimizer.guard.lag <= step + 1
        torch.cuda.synchronize()
    assert optimizer.guard.last.step == len(data) - 2 or optimizer.guard.lag > 1
    optimizer.guard.flush()
    assert (optimizer.guard.last.step, optimizer.guard.lag) == (len(data) - 1, 0)


def test_a_host_that_runs_ahead_loses_nothing(device):
    model, memory = make_model(device), fastguard.MemorySink()
    optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters(), fused=True), model, sinks=[memory])
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    first = next(model.parameters()).grad
    for step in range(100):
        torch.cuda._sleep(1_000_000)
        first.fill_(float(step))
        optimizer.step()
    optimizer.guard.flush()
    assert memory.series("step") == list(range(100))
    assert [r.gradients.max_val for r in memory.records] == [float(step) for step in range(100)]


def test_steps_on_another_stream(device, backend):
    plain = make_model(device)
    model, memory = copy.deepcopy(plain), fastguard.MemorySink()
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    guarded = fastguard.wrap(
        torch.optim.AdamW(model.parameters(), fused=True), model, max_norm=0.01, backend=backend, sinks=[memory]
    )
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    norms = []
    for step, x in enumerate(batches(device, 8)):
        backward(plain, x)
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)))
        optimizer.step()
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[step % 2]):
            backward(model, x)
            guarded.step()
        torch.cuda.current_stream().wait_stream(streams[step % 2])
    guarded.guard.flush()
    assert memory.series("grad/norm") == pytest.approx(norms, rel=1e-4)


def test_a_flush_from_another_stream_waits_for_the_step(device, backend):
    model, side = make_model(device), torch.cuda.Stream()
    optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters(), fused=True), model, backend=backend)
    inputs = batches(device, 2)
    for x in inputs:  # the first compiles
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            backward(model, x)
            torch.cuda._sleep(100_000_000)
            optimizer.step()
        optimizer.guard.flush()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
        assert optimizer.guard.last.norm == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_step_cannot_be_captured(device):
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    fastguard.wrap(optimizer, model, max_norm=0.01)
    x = batches(device, 1)[0]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            backward(model, x)
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    with pytest.raises(RuntimeError, match="cannot be captured in a graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    torch.cuda.synchronize()
    backward(model, x)
    optimizer.step()  # and all goes on
    optimizer.guard.flush()
    assert optimizer.guard.last.step == 3


def test_forward_and_backward_in_a_graph_and_the_step_outside(device, backend):
    """The gradients stay where they are, and are read there after every replay."""
    model = make_model(device)
    optimizer = fastguard.wrap(
        torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), model, max_norm=0.01, backend=backend
    )
    data = batches(device, 6)
    x = data[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).square().mean().backward()
    for values in data:
        x.copy_(values)
        for p in model.parameters():
            p.grad.zero_()
        graph.replay()
        expected = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        optimizer.step()
        optimizer.guard.flush()
        assert optimizer.guard.last.norm == pytest.approx(expected, rel=1e-4)


def test_gradients_that_lie_otherwise(device, backend):
    torch.manual_seed(0)
    plain = torch.nn.Conv2d(3, 8, 3, device=device)
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, foreach=True)
    guarded = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1, fused=True), model, backend=backend)
    for _ in range(3):
        for p, q in zip(plain.parameters(), model.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.to(memory_format=torch.channels_last) if q.dim() == 4 else p.grad.clone()
        optimizer.step()
        guarded.step()
    for p, q in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(q, p)
        assert q.dim() != 4 or q.grad.is_contiguous(memory_format=torch.channels_last)


def test_what_is_on_its_way_is_written_when_the_interpreter_exits(device, tmp_path):
    code = f"""
        import torch, fastguard
        p = torch.nn.Parameter(torch.ones(8, device="cuda"))
        optimizer = torch.optim.AdamW([p], fused=True)
        fastguard.wrap(optimizer, sinks=[fastguard.JsonlSink({str(tmp_path / "run.jsonl")!r})])
        for _ in range(5):
            p.grad = torch.ones_like(p)
            optimizer.step()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    from fastguard.sinks import read_jsonl

    assert [record["step"] for record in read_jsonl(str(tmp_path / "run.jsonl"))] == [0, 1, 2, 3, 4]
