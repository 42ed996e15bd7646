"""The page of a run: what a reader sees, that names are text only, and that it loads nothing from the network."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys

import pytest
import torch
from page_reader import Page

import fastguard
from fastguard.commands import cli, diagnose
from fastguard.visualization.runs import Ribbon, from_log

pytest.importorskip("plotly", reason="the page is an extra: pip install fastguard[report]")
pytest.importorskip("jinja2", reason="the page is an extra: pip install fastguard[report]")

from fastguard.page import build_page, parts, save_page

HOSTILE = [
    "</script><script>document.title='PWNED'</script>",
    "a\u202eb",
    "<!--<script>",
    "\x1b]0;x\x07",
    '"><img src=x onerror=alert(1)>',
]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Sixty steps, one of them skipped, with names that a browser or terminal might interpret."""
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


@pytest.fixture(scope="module")
def text(log):
    return build_page(log, command="fastguard report run.jsonl")


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def page_of(path, lines, **options):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Page(build_page(path, **options))


class TestWords:
    def test_verdict_key_numbers_findings_and_tables(self, page):
        for needed in (
            "WARNING after 60 steps: 1 warning",
            "Final loss 0.01667 best 0.01667 at step 59",
            "Steps 60 the last is step 59",
            "Skipped 1 1.67 % of the steps",
            "Parameters 24 with a gradient",
            "1 not finite",
            "1 warning: non-finite-gradients, step 31",
            "What to do:",
            "last NaN 4",
            "if there were 3 in a row",  # the rule, with its limit
            "Where NaN and Inf appeared",
            "Step 31: 4 NaN and 0 Inf in 1 tensor, skipped",
            "Made by fastguard report run.jsonl .",
        ):
            assert needed in page.words
        assert page.words.count("WARNING after 60 steps") == 1
        assert "plain.weight" in [row[0] for row in page.cells]

    def test_every_chart_in_words_and_numbers(self, page):
        plots = [attributes for _, attributes in page.elements if attributes.get("class") == "plot"]
        assert len(plots) == len(page.charts) >= 6
        assert all(one["role"] == "img" and len(one["aria-label"]) > 20 for one in plots)
        assert page.words.count("In words and numbers") == len(plots)
        assert ["loss", "1 (step 0)", "0.01667 (step 59)", "0.01667 (step 59)", "1 (step 0)"] in page.cells
        assert all(one.get("type") == "button" for tag, one in page.elements if tag == "button")

    def test_several_runs_are_compared(self, log, tmp_path):
        changed = [json.loads(line) for line in log.read_text().splitlines()]
        for line in changed:
            line.update({"loss": 2.0} if line.get("step", 0) >= 20 else {})
        other = tmp_path / "other.jsonl"
        other.write_text("\n".join(map(json.dumps, changed)))
        page = Page(build_page({"first": log, "second": other}))
        assert "second: differs from first from step 20 on: loss 2 instead of 0.04762" in page.words
        assert ["loss last", "0.01667", "2"] in page.cells
        assert page.words.index("Where they differ") < page.words.index("Findings: first")

    def test_a_history_and_a_guard(self, log):
        assert "WARNING after 60 steps" in Page(build_page(fastguard.TrainingHistory.from_jsonl(log))).words
        with pytest.raises(ValueError, match="holds no step"):
            build_page(fastguard.TrainingHistory())
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = fastguard.wrap(torch.optim.SGD([("w", weight)], lr=0.1), sinks=[lambda record: None])
        for _ in range(5):
            weight.grad = torch.ones(4)
            optimizer.step()
        words = Page(build_page(optimizer)).words
        assert "cost of sinks mean" in words and "a step on average" in words

    def test_time_since_the_first_step(self, tmp_path):
        times = [(0, 5.0), (1, 5.5), (2, 8.0), (1, 9.0), (3, 9.5)]  # a step comes again after a restart
        lines = [{"step": s, "time": at, "loss": 1.0, "grad/norm": 1.0} for s, at in times]
        page = page_of(tmp_path / "run.jsonl", lines)
        assert "Run time 4.5 s" in page.words
        assert parts.clock(from_log(tmp_path / "run.jsonl", "")) == ([0, 1, 2, 3], [0.0, 0.5, 3.0, 4.5])

    def test_rolled_back_steps(self, tmp_path):
        event = {"kind": "rollback", "step": 20, "to": 12, "reason": "the loss was NaN", "num_batches": 9}
        steps = [{"step": step, "loss": 1.0, "grad/norm": 1.0} for step in range(40)]
        page = page_of(tmp_path / "run.jsonl", [*steps, {"model": {"recoveries": [event]}}])
        assert "9 rolled back" in page.words
        bars = [one for tag, one in page.elements if tag == "rect"]
        assert [(one["x"], one["width"]) for one in bars] == [("0", "300"), ("300", "225"), ("525", "475")]

    def test_charts_need_three_samples(self, tmp_path):
        lines = [{"step": s, "loss": 1.0, "grad/norm": 1.0} for s in range(3)]
        assert page_of(tmp_path / "run.jsonl", lines[:2]).charts == []
        page = page_of(tmp_path / "run.jsonl", lines)
        assert page.charts == ["loss", "norm"] and "Learning rate: no step has a learning rate." in page.words


class TestSafety:
    def test_names_are_text(self, page, text):
        scripts = [attributes for tag, attributes in page.elements if tag == "script"]
        assert not any("src" in attributes for attributes in scripts)
        assert sum("type" not in attributes for attributes in scripts) == 2
        assert not any(tag == "img" for tag, _ in page.elements)
        names = [row[0] for row in page.unpacked("tensors")]
        assert names[0] == HOSTILE[0] and len(names) == len(HOSTILE) + 1  # the one with NaN comes first
        assert "\u202e" not in text and "\x1b" not in text

    def test_it_loads_nothing_from_the_network(self, page):
        policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "http" not in policy and "unsafe-eval" not in policy
        places = [place for key in ("src", "href", "action", "data") for place in page.with_attribute(key)]
        assert all(place.startswith("#") and place[1:] in page.with_attribute("id") for place in places)

    def test_the_same_log_gives_the_same_page(self, log, text):
        assert len(text) < 2.6e6  # 1.5 MB over plotly's basic bundle
        assert build_page(log, command="fastguard report run.jsonl") == text


class TestData:
    def test_the_norms_of_each_tensor(self, log, page, monkeypatch):
        run, lines = from_log(log, "run"), page.unpacked("lines")
        grid = run.grids["norm"]
        by_name = {parts.shown(name, 80): grid.values(name) for name in grid.rows}
        assert lines["steps"] == sorted({*range(0, 60, 5), 31})
        for (name, *_), line in zip(page.unpacked("tensors"), lines["rows"], strict=True):
            assert line == [pytest.approx(one, rel=1e-2) if math.isfinite(one) else -1 for one in by_name[name]]
        assert sum(line.count(-1) for line in lines["rows"]) == 1
        monkeypatch.setattr(parts, "_MAX_VALUES", 6 * len(grid.rows))  # of too many, the largest are kept
        fewer = Page(build_page(run)).unpacked("lines")
        assert len(fewer["steps"]) <= 6 and fewer["steps"][-1] == lines["steps"][-1]
        assert sum(line.count(-1) for line in fewer["rows"]) == 1
        assert max(map(max, fewer["rows"])) == max(map(max, lines["rows"]))

    def test_findings_are_marked_on_the_charts(self, tmp_path):
        def loss(step):
            return 9.0 if step in (60, 100) else 2.0 - step / 200

        lines = [{"step": s, "loss": loss(s), "grad/norm": 1.0 + s % 5 / 10, "lr": 0.1} for s in range(150)]
        lines[120] = {"step": 120, "grad/norm": "NaN", "skipped": True}
        page = page_of(tmp_path / "run.jsonl", lines)
        layout = page.unpacked("chart-loss")["layout"]
        shown = {note["text"]: note for note in layout["annotations"]}
        numbers = [number for text in shown for number in text.split(",")]
        with_steps = [tag for tag, one in page.elements if one.get("data-first")]
        assert len(numbers) == len(set(numbers)) == len(with_steps) >= 2
        places = [(note["x"], note["yshift"]) for note in shown.values()]
        assert len(places) == len(set(places))
        assert all(line["x0"] < line["x1"] for line in layout["shapes"])


ODD = {
    "one step": [{}],
    "constant": [{}] * 30,
    "no loss": [{"loss": None}] * 30,
    "nothing but a loss": [{"loss": 1.0, "grad/norm": None, "lr": None}] * 30,
    "never finite": [{"grad/norm": "NaN", "skipped": True, "loss": "NaN"}] * 30,
    "only skipped": [{"skipped": True, "clip/coef": 0.0}] * 30,
    "zeros and extremes": [{"grad/norm": norm, "loss": -norm} for norm in (0.0, 1e-300, 1e300, 5e-324) * 8],
    "far from the beginning": [{"step": 10**6 + 7 * i} for i in range(30)],
    "going back": [{"step": 5 + i % 10} for i in range(30)],
}


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("lines", ODD.values(), ids=ODD)
def test_odd_runs(tmp_path, lines):
    plain = {"step": 0, "loss": 1.0, "lr": 0.1, "grad/norm": 1.0}
    given = [{**plain, "step": step, **line} for step, line in enumerate(lines)]
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(json.dumps({k: v for k, v in line.items() if v is not None}) for line in given))
    words = Page(build_page({"run": path, "again": path})).words
    assert f"after {len(lines)} step" in words
    assert f"same losses and norms as run at all {len(lines)} steps in common" in words


class TestRibbon:
    @pytest.mark.slow
    def test_no_step_is_lost_among_many(self):
        ribbon = Ribbon()
        for step in range(5_000_000):
            ribbon.add(step, "not finite" if step == 3_456_789 else "good")
        assert ribbon.width == 2
        place = [i for i, state in enumerate(ribbon.worst(1000)) if state == "not finite"]
        assert place == [3_456_789 // 2 * 1000 // len(ribbon.states)]
        assert {state: num for state, num in ribbon.counts.items() if num} == {"good": 4_999_999, "not finite": 1}

    def test_a_resumed_run_gaps_and_steps_before_the_first(self):
        resumed, gaps = Ribbon(), Ribbon()
        for step in [0, 1, 2, 3, 2, 3, 4]:
            resumed.add(step, "good")
        assert resumed.worst(5) == ["good", "good", "resumed", "good", "good"] and resumed.counts["resumed"] == 1
        for step in [10, 14, 3]:
            gaps.add(step, "clipped")
        assert gaps.worst(5) == ["clipped", "none", "none", "none", "clipped"]


class TestCommand:
    def run(self, *arguments):
        return cli.main(["report", *map(str, arguments)])

    def test_beside_the_log(self, log, capsys, tmp_path, monkeypatch):
        copy, page = tmp_path / "run.jsonl", tmp_path / "run.html"
        shutil.copy(log, copy)
        assert self.run(copy) == 0
        assert capsys.readouterr().out.strip() == str(page)
        with monkeypatch.context() as patch:  # it says so before it reads the log
            patch.setattr(diagnose, "from_log", lambda *arguments: pytest.fail("read"))
            assert self.run(copy) == 3
        assert "exists already: use --force" in capsys.readouterr().err
        assert self.run(copy, "-f") == 0
        assert page.stat().st_mode & 0o777 == 0o666 & ~_umask()
        before = copy.read_bytes()
        assert self.run(copy, "-f", "-o", copy) == 3 and copy.read_bytes() == before
        assert sorted(p.name for p in tmp_path.iterdir()) == ["run.html", "run.jsonl"]

    def test_to_stdout_and_as_json(self, log, capsys):
        assert self.run(log, "-o", "-", "--title", "a <title>") == 0
        assert "<title>a &lt;title&gt; - fastguard</title>" in capsys.readouterr().out
        assert self.run(f"mine={log}", "--json", "--fail-on", "warning") == 1
        assert json.loads(capsys.readouterr().out)["mine"]["status"] == "warning"
        assert self.run(log, "--json", "--fail-on", "critical") == 0

    @pytest.mark.parametrize("to_stdout", [False, True], ids=["file", "stdout"])
    def test_no_key_and_no_title_is_interpreted_or_prevents_the_page(self, capsys, tmp_path, to_stdout):
        logs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
        for place, path in enumerate(logs):
            settings = {"\x1b]0;pwn\x07\u202e\ud800" + "k" * 500: place, "\ud801": "\udcff\x9b"}
            lines = [{"model": {"optimizer_settings": [settings]}}, {"step": 0, "grad/norm": 1.0}]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        output = "-" if to_stdout else tmp_path / "page.html"
        assert self.run(*logs, "--title", "caf\u00e9 \udcff\x1b[2J\u202e", "-o", output) == 0
        text = capsys.readouterr().out if to_stdout else output.read_text(encoding="utf-8")
        assert "<h1>caf\u00e9 \\udcff\\x1b[2J\\u202e</h1>" in text and r"optimizer \x1b]0;pwn\x07\u202e" in text
        assert [one for one in text if not one.isprintable() and one != "\n"] == []

    @pytest.mark.parametrize(
        ("content", "said"),
        [("", "no step"), ("what\n", "JSON"), ('{"model": {}}\n', "no step"), (None, "No such file")],
    )
    def test_files_that_are_not_logs(self, tmp_path, capsys, content, said):
        path = tmp_path / "x.jsonl"
        if content is not None:
            path.write_text(content)
        assert self.run(path) == 3
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


class TestSaving:
    @pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
    def test_through_a_link_but_not_over_a_broken_one(self, tmp_path):
        link, target = tmp_path / "link.html", tmp_path / "there" / "page.html"
        link.symlink_to(target)
        with pytest.raises(FileExistsError, match="exists already"):
            save_page("text", link)
        assert not target.exists()
        save_page("text", link, force=True)
        assert link.is_symlink() and target.read_text() == "text"

    def test_completely_or_not_at_all(self, tmp_path, monkeypatch):
        def fails(*arguments):
            raise OSError("no space left")

        monkeypatch.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="no space"):
            save_page("text", tmp_path / "a.html")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
    def test_into_a_pipe(self, tmp_path):
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)  # like a device: root could replace /dev/null
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        assert save_page("text", pipe, force=True) == pipe
        assert os.read(reader, 99) == b"text" and pipe.is_fifo()
        os.close(reader)


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now
