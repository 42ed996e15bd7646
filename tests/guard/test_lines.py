"""A clean step that goes to a log as a line is the line that its record would make."""

from __future__ import annotations

import json
import math
import random
import signal
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from guard_helpers import make_model, take_step

import fastguard
from fastguard.kernels import backends, cpu
from fastguard.records import strict_json
from fastguard.records.slot import LOSS_SCALE
from fastguard.sinks import flatten
from fastguard.step.ring import JudgedStep, Ring

pytestmark = pytest.mark.skipif(not backends()["cpu"].available, reason=str(backends()["cpu"].reason))


def _guarded(model: Any, sinks: Any, **settings: Any) -> Any:
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
def test_the_text_is_that_of_json(tensors: Any, loss: float | None) -> None:
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


def test_numbers_are_written_as_python_writes_them() -> None:
    """Any bits, powers of ten on either side of where an exponent is written, integers, halves."""
    generator = random.Random(7)
    values = [struct.unpack("d", generator.randbytes(8))[0] for _ in range(3000)]
    values += [sign * 10.0**k for k in range(-324, 309) for sign in (1, -1)] + [
        0.0,
        -0.0,
        5e-324,
        1.7976931348623157e308,
    ]
    values += (
        [float(k) for k in range(-50, 50)] + [k + 0.5 for k in range(50)] + [123456789012345680.0, 9999999999999998.0]
    )
    values += [generator.uniform(-1, 1) * 10.0 ** generator.randint(-6, 18) for _ in range(3000)]
    ring = Ring()
    ring.arrive(JudgedStep(0, bytearray(), None, (), 1.0))
    for value in values:
        ring.note("loss", value)
        text = cpu.json_line(ring.headers, ring.newest, bytearray(), 0.0).decode()
        assert json.loads(text)["loss"] == strict_json.loads(strict_json.dumps(value))
        assert f'"loss":{strict_json.dumps(value)},' in text


def test_a_log_is_the_same_whether_steps_go_as_lines_or_as_records(tmp_path: Path) -> None:
    class Recording(fastguard.JsonlSink):
        """With a `write` of its own, which has to be called."""

        def write(self, record: fastguard.StepStats) -> None:
            super().write(record)

    logs = []
    for kind in (fastguard.JsonlSink, Recording):
        model = make_model()
        path = tmp_path / f"{kind.__name__}.jsonl"
        optimizer = _guarded(model, [kind(path, tensors_every=7)], max_norm=0.3, weights=10)
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


def test_a_disk_that_is_full_in_the_middle_of_a_line_costs_that_line_alone(tmp_path: Path) -> None:
    """A limit on the size of files cuts the write off, as a full disk does."""
    resource = pytest.importorskip("resource", reason="no limits on this system")
    path, model = tmp_path / "run.jsonl", make_model()
    optimizer = _guarded(model, [fastguard.JsonlSink(path, tensors_every=0)])
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
