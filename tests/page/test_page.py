"""The page of a run: what stands in it, that nothing of it is obeyed, and that it asks nothing of the network."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html.parser
import json
import math
import os
import re
import shutil
import sys
from array import array

import pytest
import torch

import fastguard
from fastguard.commands import cli, report
from fastguard.visualization.ribbon import Ribbon
from fastguard.visualization.runs import from_log

pytest.importorskip("plotly", reason="the page is an extra: pip install fastguard[report]")
jinja2 = pytest.importorskip("jinja2", reason="the page is an extra: pip install fastguard[report]")

from fastguard.page import build_page, parts, save_page  # noqa: E402
from fastguard.page.parts import tensor_lines, tensor_rows  # noqa: E402

HOSTILE = [
    "</script><script>document.title='PWNED'</script>",
    "a\u202eb",
    "<!--<script>",
    "\x1b]0;x\x07",
    '"><img src=x onerror=alert(1)>',
]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Sixty steps, one of them skipped, with names that somebody might obey."""
    path = tmp_path_factory.mktemp("page") / "run.jsonl"
    torch.manual_seed(0)
    parameters = [(name, torch.nn.Parameter(torch.randn(4))) for name in ["plain.weight", *HOSTILE]]
    with_log = [fastguard.JsonlSink(path, tensors_every=5)]
    optimizer = fastguard.wrap(torch.optim.SGD([{"params": parameters}], lr=0.1), max_norm=1.0, sinks=with_log)
    for step in range(60):
        for _, parameter in parameters:
            parameter.grad = torch.randn(4) * (math.nan if step == 31 and parameter is parameters[1][1] else 1.0)
        optimizer.step()
        optimizer.guard.observe(loss=1.0 / (step + 1))
    optimizer.guard.close()
    return path


class Reader(html.parser.HTMLParser):
    """What a browser would make of it: elements, with what they hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data):
        self.texts.setdefault(self._open, []).append(data)


def unpacked(page: str, name: str):
    """What the page has packed under that name."""
    found = re.search(rf'<script type="text/plain" id="packed-{name}">([^<]*)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


@pytest.fixture(scope="module")
def page(log):
    return build_page(log, command="fastguard report run.jsonl")


def test_verdict_findings_and_tables_stand_in_the_text(page):
    words = page[: page.index('<script type="application/json"')]
    assert "WARNING after 60 steps" in words
    assert "non-finite-gradients" in words and "What to do:" in words
    assert "1 not finite" in words
    assert '<th scope="row">plain.weight</th>' in words
    assert "Step 31:" in words


def test_names_are_text_wherever_they_stand(page):
    reader = Reader(page)
    scripts = [attributes for tag, attributes in reader.elements if tag == "script"]
    assert not any("src" in attributes for attributes in scripts)
    assert sum("type" not in attributes for attributes in scripts) == 2
    assert not any(tag == "img" for tag, _ in reader.elements)
    names = [row[0] for row in unpacked(page, "tensors")]
    assert names[0] == "plain.weight" and len(names) == len(HOSTILE) + 1
    assert "\u202e" not in page and "\x1b" not in page[: page.index('id="plotly"')]


def test_it_asks_nothing_of_the_network(page):
    reader = Reader(page)
    policy = next(a["content"] for tag, a in reader.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy and "unsafe-eval" not in policy
    places = [a[key] for _, a in reader.elements for key in ("src", "href", "action", "data") if key in a]
    assert places == []


def test_every_chart_has_a_text_alternative(page):
    reader = Reader(page)
    plots = [a for _, a in reader.elements if a.get("class") == "plot"]
    assert len(plots) >= 6
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in plots)
    assert page.count("<summary>In words and numbers</summary>") == len(plots)
    assert "<td>2.0 (step 0)</td>" not in page and "<td>1 (step 0)</td><td>0.01667 (step 59)</td>" in page
    labelled = {a.get("for") for tag, a in reader.elements if tag == "label"}
    assert labelled and all(a.get("type") == "button" for tag, a in reader.elements if tag == "button")


def test_the_same_log_gives_the_same_page(log, page):
    assert build_page(log, command="fastguard report run.jsonl") == page


def test_the_footer_says_which_log_it_was(log, page):
    digest = hashlib.sha256(log.read_bytes()).hexdigest()
    assert f"Read from run.jsonl, {log.stat().st_size:,} bytes, SHA-256 <code>{digest}</code>." in page


def test_each_tensors_norms_are_there(log):
    run = from_log(log, "run")
    about, values = tensor_lines(run)
    assert about["steps"] == sorted({*range(0, 60, 5), 31})
    rows = [row[0] for row in tensor_rows(run)["rows"]]
    codes = array("H", values)
    assert len(codes) == len(rows) * len(about["steps"])
    per_code = (about["high"] - about["low"]) / (about["top"] - 1)
    for place, name in enumerate(run.in_order(run.grids["norm"].rows)):
        line = codes[place * len(about["steps"]) : (place + 1) * len(about["steps"])]
        for code, norm in zip(line, run.grids["norm"].values(name)):
            if math.isfinite(norm):
                assert math.exp(about["low"] + (code - 1) * per_code) == pytest.approx(norm, rel=1e-3)
            else:
                assert code == about["bad"]
    assert list(codes).count(about["bad"]) == 1


def test_of_too_many_norms_the_largest_stand(log, monkeypatch):
    run = from_log(log, "run")
    highest = tensor_lines(run)[0]["high"]
    monkeypatch.setattr(parts, "_MAX_VALUES", 6 * len(run.grids["norm"].rows))
    about, values = tensor_lines(run)
    assert len(about["steps"]) <= 6 and about["steps"][-1] == run.grids["norm"].steps[-1][1]
    assert list(array("H", values)).count(about["bad"]) == 1 and about["high"] == highest


def test_several_runs_are_compared(log, tmp_path):
    lines = log.read_text().splitlines()
    other = tmp_path / "other.jsonl"
    changed = [json.loads(line) for line in lines]
    for line in changed:
        if line.get("step", 0) >= 20:
            line["loss"] = 2.0
    other.write_text("\n".join(json.dumps(line) for line in changed))
    words = build_page({"first": log, "second": other})
    assert "second: parts from first at step 20: loss " in words and "there, 2.0 here" in words
    assert '<th scope="row">loss_last</th>' in words


def test_a_history_and_a_guard(log):
    history = fastguard.TrainingHistory.from_jsonl(log)
    assert "WARNING after 60 steps" in build_page(history)
    empty = fastguard.TrainingHistory()
    with pytest.raises(ValueError, match="holds no step"):
        build_page(empty)


ODD = {
    "one step": [{}],
    "constant": [{}] * 30,
    "no loss": [{"loss": None}] * 30,
    "nothing but a loss": [{"loss": 1.0, "grad/norm": None, "lr": None}] * 30,
    "never finite": [{"grad/norm": "NaN", "skipped": True, "loss": "NaN"}] * 30,
    "only skipped": [{"skipped": True, "clip/coef": 0.0}] * 30,
    "zeros and extremes": [{"grad/norm": norm, "loss": -norm} for norm in (0.0, 1e-300, 1e300, 5e-324) * 8],
    "far from the beginning": [{"step": 10**6 + 7 * i} for i in range(30)],
    "going back": [{"step": i % 10} for i in range(30)],
}


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("lines", ODD.values(), ids=ODD)
def test_odd_runs(tmp_path, lines):
    plain = {"step": 0, "loss": 1.0, "lr": 0.1, "grad/norm": 1.0}
    given = [{**plain, "step": step, **line} for step, line in enumerate(lines)]
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(json.dumps({k: v for k, v in line.items() if v is not None}) for line in given))
    words = build_page([path, path])
    assert f"after {len(lines)} step" in words
    assert f"the same losses and norms as run.jsonl at all {len(lines)} steps in common" in words


def test_what_was_rolled_back_is_seen(tmp_path):
    event = {"kind": "rollback", "step": 20, "to": 12, "reason": "the loss was NaN", "num_batches": 9}
    steps = [{"step": step, "loss": 1.0, "grad/norm": 1.0} for step in range(40)]
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, [*steps, {"model": {"recoveries": [event]}}])))
    words = build_page(path)
    assert "9 rolled back" in words and '<rect x="300" y="15" width="225"' in words


def test_costs_of_a_guard_are_there():
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = fastguard.wrap(torch.optim.SGD([("w", weight)], lr=0.1), sinks=[lambda record: None])
    for _ in range(5):
        weight.grad = torch.ones(4)
        optimizer.step()
    page = build_page(optimizer)
    assert "<dt>sink FunctionSink(" in page and "us a step on average" in page
    assert "<h2>Magnitudes</h2>" in page and "gradients: from 2^0 to 2^1" in page


class TestRibbon:
    def test_no_step_is_lost_among_many(self):
        ribbon = Ribbon()
        for step in range(5_000_000):
            ribbon.add(step, "not finite" if step == 3_456_789 else "good")
        assert ribbon.width == 2
        worst = ribbon.worst(1000)
        place = [i for i, state in enumerate(worst) if state == "not finite"]
        assert place == [3_456_789 // 2 * 1000 // len(ribbon.states)]
        assert {state: num for state, num in ribbon.counts.items() if num} == {"good": 4_999_999, "not finite": 1}

    test_no_step_is_lost_among_many = pytest.mark.slow(test_no_step_is_lost_among_many)

    def test_a_resumed_run(self):
        ribbon = Ribbon()
        for step in [0, 1, 2, 3, 2, 3, 4]:
            ribbon.add(step, "good")
        assert ribbon.worst(5) == ["good", "good", "resumed", "good", "good"]
        assert ribbon.counts["resumed"] == 1

    def test_gaps_and_steps_before_the_first(self):
        ribbon = Ribbon()
        for step in [10, 14, 3]:
            ribbon.add(step, "clipped")
        assert ribbon.worst(5) == ["clipped", "none", "none", "none", "clipped"]


class TestCommand:
    def run(self, *arguments):
        return cli.main(["report", *map(str, arguments)])

    def test_beside_the_log(self, log, capsys, tmp_path):
        copy = tmp_path / "run.jsonl"
        shutil.copy(log, copy)
        assert self.run(copy) == 0
        assert capsys.readouterr().out.strip() == str(tmp_path / "run.html")
        assert self.run(copy) == 3
        assert "exists already; --force" in capsys.readouterr().err
        assert self.run(copy, "-f") == 0
        assert (tmp_path / "run.html").stat().st_mode & 0o777 == 0o666 & ~_umask()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["run.html", "run.jsonl"]

    def test_to_stdout_and_as_json(self, log, capsys):
        assert self.run(log, "-o", "-", "--title", "a <title>") == 0
        assert "<title>a &lt;title&gt; - fastguard</title>" in capsys.readouterr().out
        assert self.run(f"mine={log}", "--json") == 0
        assert json.loads(capsys.readouterr().out)["mine"]["status"] == "warning"

    def test_a_long_read_is_told_on_a_terminal_and_nowhere_else(self, log, capsys, monkeypatch):
        monkeypatch.setattr(report, "_TELL_EVERY_S", 0.0)
        assert self.run(log, "--json") == 0
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        assert self.run(log, "--json") == 0
        told = capsys.readouterr().err
        assert f"\rrun.jsonl [{'#' * 30}] 100%" in told and told.endswith(" \r")

    def test_what_is_there_is_told_before_the_log_is_read(self, log, capsys, tmp_path, monkeypatch):
        (tmp_path / "x.html").touch()
        monkeypatch.setattr(report, "from_log", lambda *arguments: pytest.fail("read"))
        assert self.run(log, "-o", tmp_path / "x.html") == 3
        assert "exists already" in capsys.readouterr().err

    def test_it_fails_as_it_is_asked_to(self, log, capsys):
        assert self.run(log, "--json", "--fail-on", "warning") == 1
        assert self.run(log, "--json", "--fail-on", "critical") == 0

    @pytest.mark.parametrize(
        ("content", "said"),
        [("", "no step"), ("what\n", "JSON"), ('{"model": {}}\n', "no step"), (None, "No such file")],
    )
    def test_what_is_no_log(self, tmp_path, capsys, content, said):
        path = tmp_path / "x.jsonl"
        if content is not None:
            path.write_text(content)
        assert self.run(path) == 3
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1

    def test_the_log_itself_is_not_written_over(self, log, capsys):
        before = log.read_bytes()
        assert self.run(log, "-f", "-o", log) == 3
        assert log.read_bytes() == before


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def fails(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="no space"):
        save_page("text", tmp_path / "a.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_page_is_written_into_a_pipe_and_through_a_link(tmp_path):
    pipe, link, target = tmp_path / "pipe", tmp_path / "link.html", tmp_path / "there" / "page.html"
    os.mkfifo(pipe)  # as a device is; who may make one would have /dev/null replaced
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert save_page("text", pipe, force=True) == pipe
    assert os.read(reader, 99) == b"text" and pipe.is_fifo()
    os.close(reader)
    link.symlink_to(target)
    save_page("text", link)
    assert link.is_symlink() and target.read_text() == "text"
