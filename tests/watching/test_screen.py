"""What is on the screen: at any size, of any run, with any name in it."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the live view is an extra: pip install fastguard[watch]")

from rich.console import Console

from fastguard.commands.following import FollowedRun
from fastguard.commands.watch import as_text, lines_of, sparkline
from fastguard.records.samples import WeightStats
from fastguard.sinks import JsonlSink

from records import make_bad_record, make_record

NOW = 1.8e9
HOSTILE = "a[/b]\x1b]0;owned\x07\x1b[2J\u202e\x9b\n[red]"


@pytest.fixture
def log(tmp_path):
    """Writes a log; a step is a norm."""

    def write(norms, name="layer.weight", **more) -> Path:
        path = tmp_path / "run.jsonl"
        with JsonlSink(path, tensors_every=1) as sink:
            for step, norm in enumerate(norms):
                bad = [name] if math.isnan(norm) else []
                weights = (WeightStats(name, 4, 2.0, 0.5, 1.0, 0.1, 0.003),)
                record = make_bad_record(step, bad, [name, "b"], skipped=bool(bad), loss=2.0 - step / 99, **more)
                sink.write(record if step % 10 else make_record(step, norm, loss=2.0, weights=weights))
        return path

    return write


def followed(path: Path) -> FollowedRun:
    run = FollowedRun(path)
    run.read()
    run.assess()
    return run


def drawn(run: FollowedRun, width: int = 100, height: int | None = 40) -> list[str]:
    """What a terminal without colours would show."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, height=height, color_system=None, markup=False, emoji=False)
    lines = lines_of(run, now=NOW, width=width, height=height)
    console.print(as_text(lines, crops=height is not None), soft_wrap=height is None)
    return stream.getvalue().rstrip("\n").split("\n")


def test_all_there_is_to_see(log):
    lines = drawn(followed(log([1.0] * 61 + [math.nan] + [1.0] * 5)))
    text = "\n".join(lines)
    assert "run.jsonl" in lines[0] and "nothing for" in lines[0]
    assert lines[1].startswith("WARNING at step 66: 1 warning")
    assert lines[2].startswith("likely cause: ")
    rows = {line.split("  ")[0]: line for line in lines if line}
    assert rows["loss"].split()[1] == "1.333" and "x" in rows["grad norm"]
    assert rows["skipped"].split()[1:3] == ["1.49", "%"] and "1 of 67" in rows["skipped"]
    assert "last at step 61, first in layer.weight" in rows["NaN or Inf"]
    assert "layer.weight" in text and "0.0015" in text
    assert "[warning] non-finite-gradients, step 61, in layer.weight" in text


def test_the_guide_shows_what_is_drawn(log):
    guide = Path(__file__).parents[2] / "docs" / "guide" / "watch.md"
    if not guide.is_file():
        pytest.skip("docs/ is not beside the tests: they run from a copy")
    shown = guide.read_text(encoding="utf-8").partition("```text\n")[2].partition("```")[0]
    lines = drawn(followed(log([1.0] * 61 + [math.nan] + [1.0] * 5, val_loss=1.0, lr=0.1)))
    row = re.compile(r"^(?:likely cause|layer|[a-zA-Z]+(?: [a-zA-Z]+)*(?=  ))", re.M)
    labels = row.findall(shown)
    assert len(labels) == 9 and set(labels) <= set(row.findall("\n".join(lines)))


def test_stays_within_the_terminal(log, tmp_path):
    for norms in ([], [1.0], [1.0] * 60 + [math.nan] * 30):
        run = followed(log(norms))
        for width in (1, 5, 20, 33, 80, 300):
            for height in (1, 2, 7, 12, 24, 60):
                lines = drawn(run, width, height)
                assert len(lines) <= height and max(map(len, lines)) <= width
                assert lines[0].strip()
        (tmp_path / "run.jsonl").unlink()


@pytest.mark.parametrize("height", [40, None])
def test_names_are_shown_not_obeyed(log, height):
    text = "\n".join(drawn(followed(log([1.0] * 60 + [math.nan], name=HOSTILE)), 200, height))
    assert text.replace("\n", "").isprintable() and "\u202e" not in text
    assert r"a[/b]\x1b]0;owned" in text


def test_a_log_by_hand_with_hostile_values(tmp_path):
    path = tmp_path / f"run{HOSTILE.replace('/', '')}.jsonl"
    line = {"step": 1, "loss": "Infinity", "grad/norm": "NaN", "nonfinite": [HOSTILE], "lr": -1e999, "time": "x"}
    text = json.dumps({"time": 1.0, "model": {"names": [HOSTILE]}}) + "\n" + json.dumps(line).replace("-Inf", "-Inf")
    path.write_text(f"{text}\n" + json.dumps({**line, "step": 2, "loss": None}) + "\n")
    text = "\n".join(drawn(followed(path), 200))
    assert text.replace("\n", "").isprintable() and "inf" in text
    for written in ("1e999", "-1e308", "NaN", "-1", "null", "[]"):
        path.write_text(f'{{"step":3,"time":{written}}}\n{{"step":{10**400},"time":{written}}}\n')
        lines = drawn(followed(path), 80)
        assert lines[1] == "NO EVIDENCE at step 3: no gradient was seen" and len(lines[0]) <= 80


def test_an_empty_log_waits(log):
    assert drawn(followed(log([])))[1] == "WAITING for a step"


def test_what_is_not_there_is_said(tmp_path):
    assert drawn(followed(tmp_path / "none.jsonl"))[2] == "the log is not there yet"


def test_a_log_that_is_being_read_says_so(log):
    run = FollowedRun(log([1.0] * 600))
    run.read(seconds=0.0)
    lines = drawn(run)
    assert lines[1] == "AT STEP 255, not judged yet" and lines[2].startswith("reading the log: ")
    assert not any("[warning]" in line for line in lines)


class TestSparkline:
    def test_no_spike_is_lost(self):
        line = sparkline([1.0] * 5000 + [50.0] + [1.0] * 5000, 40)
        assert line.count("█") == 1 and set(line) == {"▁", "█"}

    def test_nor_is_what_is_not_finite(self):
        values = [1.0] * 10_000
        values[7777] = math.inf
        assert sparkline(values, 10) == "▁▁▁▁▁▁▁x▁▁"

    @pytest.mark.parametrize("is_log", [False, True])
    def test_odd_values(self, is_log):
        assert sparkline([], 10, is_log=is_log) == sparkline([1.0], 0, is_log=is_log) == ""
        assert sparkline([None, None], 10, is_log=is_log) == "  "
        assert sparkline([math.nan] * 3, 10, is_log=is_log) == "xxx"
        assert len(sparkline([0.0, -1.0, 1e-320, 1e308, -1e308], 10, is_log=is_log)) == 5

    def test_a_logarithmic_one(self):
        assert sparkline([1.0, 10.0, 100.0], 3, is_log=True) == "▁▅█"
        assert sparkline([1.0, 10.0, 100.0], 3) == "▁▂█"
