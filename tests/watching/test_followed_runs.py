"""A run that is read while it is written is the run that `diagnose` reads afterwards."""

import json
import math
import os
import random
import re
from pathlib import Path

import pytest

from fastguard.commands.watch import FollowedRun, lines_of, log_at
from fastguard.records import TrainingHistory
from fastguard.records.samples import WeightStats
from fastguard.report import build_report
from fastguard.sinks import JsonlSink

from made_runs import activity
from records import make_bad_record, make_record


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def write(sink, steps, bad=(), **more):
    for step in steps:
        losses = {"loss": 2.0 - step / 1000, "lr": 1e-3, **more}
        sink.write(make_bad_record(step, ["b"], **losses) if step in bad else make_record(step, 1.0, **losses))


def state(history):
    return json.dumps(history.state_dict())


def test_is_what_reading_it_at_once_gives(path):
    run = FollowedRun(path)
    run.read()
    assert run.problem and not run.history.num_steps
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
    assert run.report.to_dict() == build_report(whole).to_dict()


def test_a_new_run_in_a_new_file(path):
    """What was known of the one before, its model and findings too, is forgotten."""
    run = FollowedRun(path)
    with JsonlSink(path) as sink:
        sink.note({"names": ["old"], "zero_lr": ["old"]})
        write(sink, range(20), bad=(3, 4))
    run.read()
    assert run.report.findings
    path.rename(path.with_suffix(".1"))
    with JsonlSink(path) as sink:
        sink.note({"names": ["new"]})
        write(sink, range(10))
    run.read()
    assert (run.history.num_steps, run.history.num_skipped, run.history.newest_step) == (10, 0, 9)
    assert run.history.model.names == ("new",) and run.history.model.zero_lr == ()
    assert state(run.history) == state(TrainingHistory.from_jsonl(path))


def test_damaged_lines_are_counted_and_left_out(path):
    path.write_text('{"step":0,"loss":1.0}\n{"step":1,"lo\n\0\0\n{"step":3,"loss":"NaN"}\n{"step":4,"lo')
    run = FollowedRun(path)
    run.read()
    assert run.history.step == [0, 3] and math.isnan(run.history.loss[1])
    assert "2 damaged lines left out" in lines_of(run)


def test_what_is_no_log_is_refused(path):
    path.write_text("what\n")
    with pytest.raises(ValueError, match="a log must have"):
        FollowedRun(path).read()


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


HOSTILE = "a[/b]\x1b]0;owned\x07\x1b[2J\u202e\x9b\n[red]"


def shown(path):
    run = FollowedRun(path)
    run.read()
    return lines_of(run)


def test_the_block_is_the_newest_numbers_and_the_report(path):
    with JsonlSink(path) as sink:
        write(sink, range(67), bad=(61,), val_loss=2.5)
    lines = shown(path)
    assert lines[0] == str(path) and lines[3] == "WARNING after 67 steps: 1 warning"
    assert re.fullmatch(r"step 66: loss 1.934, grad norm 1\S*, val loss 2.5, lr 0.001", lines[1])
    assert any(line.startswith("Likely cause: ") for line in lines)
    assert "[warning] non-finite-gradients, step 61, in b" in lines


def test_names_and_values_are_shown_not_obeyed(path):
    line = {"step": 1, "loss": "Infinity", "grad/norm": "NaN", "nonfinite": [HOSTILE], "lr": -1.0, "time": "x"}
    path.write_text(json.dumps({"time": 1.0, "model": {"names": [HOSTILE]}}) + "\n" + json.dumps(line) + "\n")
    text = "".join(shown(path))
    assert text.isprintable() and text.isascii() and r"a[/b]\x1b]0;owned" in text


def test_before_there_is_a_step(path):
    assert lines_of(FollowedRun(path))[1] == "WAITING for a step"
    assert shown(path)[1] == "the log cannot be read: No such file or directory"
    path.write_text('{"step":3}\n')
    assert shown(path)[1:4] == ["step 3: grad norm 0", "", "NO EVIDENCE after 1 step: 1 remark"]


LINE = '{"step":%d,"loss":1.0,"grad/norm":1.0}\n'


@pytest.mark.parametrize("seed", range(3))
def test_a_line_is_read_when_it_is_whole(path, seed):
    rng, text, run = random.Random(seed), "".join(LINE % step for step in range(60)), FollowedRun(path)
    while text:
        size = rng.choice((1, 7, 100, 1000))
        with open(path, "a") as file:
            file.write(text[:size])
        text = text[size:]
        run.read()
    assert run.history.step == list(range(60))


def test_another_file_in_its_place_is_another_log(path):
    run = FollowedRun(path)
    path.write_text(LINE % 0 + LINE % 1 + LINE % 2)
    run.read()
    path.rename(f"{path}.1")
    run.read()
    assert "No such file" in run.problem and run.history.newest_step == 2
    path.write_text(LINE % 7)
    run.read()
    assert run.history.step == [7] and not run.problem
    path.write_text("")
    run.read()
    assert not run.history.num_steps
    path.write_text(LINE % 8)
    run.read()
    assert run.history.step == [8]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_not_to_be_read(path):
    path.write_text(LINE % 0)
    path.chmod(0)
    run = FollowedRun(path)
    run.read()
    assert "cannot be read" in run.problem
    path.chmod(0o600)
    run.read()
    assert run.history.newest_step == 0 and not run.problem


def test_what_is_no_file_is_refused():
    with pytest.raises(ValueError, match="must be a file or a folder"):
        FollowedRun(Path(os.devnull)).read()


def test_the_newest_log_of_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no \*\.jsonl in"):
        log_at(tmp_path)
    for age, name in enumerate(["b/new.jsonl", "a.jsonl", "newest.txt", "b/c/deeper.jsonl"]):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("")
        os.utime(path, (1e9 - age, 1e9 - age))
    assert log_at(tmp_path) == tmp_path / "b/new.jsonl"
    assert log_at(tmp_path / "any") == tmp_path / "any"
