"""A run that is read while it is written is the run that `diagnose` reads afterwards."""

from __future__ import annotations

import json
import math
import time

import pytest

from fastguard.commands.following import ASK_EVERY, FollowedRun
from fastguard.diagnosis import RULES, Finding, rule
from fastguard.records import TrainingHistory
from fastguard.records.samples import WeightStats
from fastguard.report import build_report
from fastguard.sinks import JsonlSink, jsonl

from made_runs import activity
from records import make_bad_record, make_record


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def write(sink: JsonlSink, steps, bad=(), **more) -> None:
    for step in steps:
        losses = {"loss": 2.0 - step / 1000, "lr": 1e-3, **more}
        sink.write(make_bad_record(step, ["b"], **losses) if step in bad else make_record(step, 1.0, **losses))


def state(history: TrainingHistory) -> str:
    return json.dumps(history.state_dict())


def test_is_what_reading_it_at_once_gives(path):
    run = FollowedRun(path)
    assert not run.read() and run.newest_step == -1
    with JsonlSink(path, tensors_every=10) as sink:
        sink.note({"names": ["w"], "steps_per_epoch": 7})
        for begin in range(0, 900, 90):
            write(sink, range(begin, begin + 90), bad=(333,))
            sampled = {"weights": (WeightStats("w", 64, 2.0, 0.5, 1.0, 0.1, 0.1),), "activations": (activity(),)}
            sink.write(make_record(begin + 90, loss=1.0, **sampled))
            if begin == 450:
                sink.note({"zero_lr": ["w"]})
            run.read()
    whole = TrainingHistory.from_jsonl(path)
    assert state(run.history) == state(whole) and run.history.last == whole.last
    assert run.history.model.zero_lr == ("w",)
    run.history.has_ended = True
    run.assess()
    assert run.report.to_dict() == build_report(whole).to_dict()
    assert run.went_back_to == 810 and run.num_left_out == 0


def test_takes_its_time_and_no_more(path):
    with JsonlSink(path) as sink:
        write(sink, range(3 * ASK_EVERY))
    run = FollowedRun(path)
    seen = []
    while run.read(seconds=0.0):
        seen.append(run.history.num_steps)
    assert seen == [ASK_EVERY, 2 * ASK_EVERY, 3 * ASK_EVERY][: len(seen)] and len(seen) >= 2
    assert run.history.num_steps == 3 * ASK_EVERY


@pytest.fixture
def odd_rule():
    """A rule that finds what nobody else looks for: a loss of exactly 77, more severe when there are two."""

    @rule("odd", severity="critical")
    def odd(history):
        num = history.loss.count(77.0)
        if num:
            return Finding(f"{num} of them", severity="critical" if num > 1 else "warning")

    yield
    del RULES["odd"]


def test_a_finding_is_told_once_unless_it_becomes_more_severe(path, odd_rule):
    run = FollowedRun(path)

    def told() -> list[str]:
        run.read()
        run.assess()
        return [one.severity for one in run.told if one.rule == "odd"]

    with JsonlSink(path) as sink:
        write(sink, range(5))
        assert told() == []
        write(sink, [5], loss=77.0)
        assert told() == ["warning"] == told()
        write(sink, [6], loss=77.0)
        assert told() == ["warning", "critical"]


def test_what_has_left_the_window_was_told(path, odd_rule):
    """Read at once or line by line: rules are asked while a step is still in their window."""
    with JsonlSink(path) as sink:
        write(sink, [0], loss=77.0)
        write(sink, range(1, 2000))
    run = FollowedRun(path)
    run.read()
    assert "odd" in [one.rule for one in run.told]
    assert "odd" not in [finding.rule for finding in build_report(run.history).findings]


def test_a_new_run_in_a_new_file(path):
    """What was known of the one before, its model and findings too, is forgotten."""
    run = FollowedRun(path)
    with JsonlSink(path) as sink:
        sink.note({"names": ["old"], "zero_lr": ["old"]})
        write(sink, range(20), bad=(3, 4))
    run.read()
    run.assess()
    before = run.told
    path.rename(path.with_suffix(".1"))
    with JsonlSink(path) as sink:
        sink.note({"names": ["new"]})
        write(sink, range(10))
    run.read()
    assert run.report is None and before and not run.told
    assert (run.history.num_steps, run.history.num_skipped, run.newest_step) == (10, 0, 9)
    assert run.history.model.names == ("new",) and run.history.model.zero_lr == ()
    assert state(run.history) == state(TrainingHistory.from_jsonl(path))


def test_a_run_that_goes_on_in_another_file(path):
    run = FollowedRun(path)
    with JsonlSink(path) as sink:
        sink.note({"names": ["w"]})
        write(sink, range(20))
        run.read()
        path.rename(path.with_suffix(".1"))
        sink._look_at = 0.0
        write(sink, range(20, 40))
    run.read()
    assert (run.history.num_steps, run.newest_step, run.went_back_to) == (40, 39, None)
    assert run.history.model.names == ("w",)


def test_lines_that_a_sink_repeats_count_once(path, monkeypatch):
    """After a deletion a sink writes again what it had written to the deleted file; it may have been read."""
    ahead = [0.0]
    monkeypatch.setattr(jsonl, "_monotonic", lambda: time.monotonic() + ahead[0])
    run = FollowedRun(path)
    with JsonlSink(path) as sink:
        write(sink, range(10))
        run.read()
        ahead[0] += 1.0
        write(sink, range(10, 12))
        write(sink, range(12, 15))
        run.read()
        path.unlink()
        ahead[0] += 1.0
        write(sink, range(15, 20))
        run.read()
        assert json.loads(path.read_text().splitlines()[0])["step"] < 15
    assert run.history.step == list(range(20)) and run.went_back_to is None


def test_going_back_in_one_file_is_a_resumed_run(path):
    run = FollowedRun(path)
    with JsonlSink(path) as sink:
        write(sink, range(50))
        write(sink, range(40, 60))
    run.read()
    assert (run.history.num_steps, run.went_back_to, run.newest_step) == (70, 40, 59)


def test_damaged_lines_are_counted_and_left_out(path):
    run = FollowedRun(path)
    path.write_text('{"step":0,"loss":1.0}\n{"step":1,"lo\n{"step":2,"loss":[]}\nwhat\n\0\0\n{"loss":1.0}\n')
    run.read()
    with open(path, "a") as file:
        file.write('{"step":3,"loss":"NaN"}\n')
    run.read()
    assert run.history.step == [0, 3] and math.isnan(run.history.loss[1])
    assert run.num_left_out == 5


def test_what_is_no_log_is_refused(path):
    path.write_text("what\n")
    with pytest.raises(ValueError, match="a log must have"):
        FollowedRun(path).read()


def test_layers_that_findings_name_come_first(path):
    with JsonlSink(path, tensors_every=1) as sink:
        for step in range(40):
            sink.write(make_bad_record(step, ["b"] if step > 30 else [], loss=1.0, skipped=step > 30))
    run = FollowedRun(path)
    run.read()
    run.assess()
    assert run.layers[0].name == "b" and run.layers[0].is_named
    assert {layer.name for layer in run.layers} == {"a", "b", "c"}


def test_a_misfit_leaves_out_no_line_beside_it(path):
    """In the same piece of a log, with a note of the model in it that is one too."""
    lines = [f'{{"step":{step},"loss":1.0,"grad/norm":1.0}}' for step in range(20)]
    lines[15] = '{"step":15,"loss":[]}'
    lines[7] = '{"loss":1.0}'
    lines.insert(3, '{"time":1.0,"model":{"names":"abc"}}')
    lines.insert(9, '{"event":"of a newer version"}')
    path.write_text("\n".join(lines) + "\n")
    run = FollowedRun(path)
    run.read()
    assert run.history.step == [*range(7), *range(8, 15), *range(16, 20)] and run.num_left_out == 2


def test_a_log_without_norms_is_no_evidence(path):
    lines = [f'{{"step":{step},"loss":1.0}}\n' for step in range(600)]
    path.write_text("".join(lines))
    run = FollowedRun(path)
    run.read()
    with open(path, "a") as file:
        file.write('{"step":600,"loss":1.0}\n')
    run.read()
    assert run.history.lacks_norms
    with open(path, "a") as file:
        file.write('{"step":601,"loss":1.0,"grad/norm":1.0}\n')
    run.read()
    assert not run.history.lacks_norms
