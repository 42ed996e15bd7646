"""The page of a run: what stands in it, that nothing of it is obeyed, and that it asks nothing of the network."""

from __future__ import annotations

import base64
import gzip
import html.parser
import json
import math
import os
import re
import shutil
import sys

import pytest
import torch

import fastguard
from fastguard.commands import cli, report
from fastguard.report import build_report
from fastguard.visualization.ribbon import Ribbon
from fastguard.visualization.runs import from_log

pytest.importorskip("plotly", reason="the page is an extra: pip install fastguard[report]")
jinja2 = pytest.importorskip("jinja2", reason="the page is an extra: pip install fastguard[report]")

from fastguard import diagnosis  # noqa: E402
from fastguard.page import build_page, charts, parts, save_page  # noqa: E402
from fastguard.page.parts import key_numbers, tensor_lines  # noqa: E402

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
    assert names[0] == HOSTILE[0] and len(names) == len(HOSTILE) + 1  # the one that held NaN
    assert "\u202e" not in page and "\x1b" not in page


def test_it_asks_nothing_of_the_network(page):
    reader = Reader(page)
    policy = next(a["content"] for tag, a in reader.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy and "unsafe-eval" not in policy
    places = [a[key] for _, a in reader.elements for key in ("src", "href", "action", "data") if key in a]
    assert [place for place in places if not place.startswith("#")] == []
    assert {place[1:] for place in places} <= {a.get("id") for _, a in reader.elements}


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
    assert len(page) < 2.6e6  # 1.5 MB over plotly's basic bundle
    assert build_page(log, command="fastguard report run.jsonl") == page


def test_each_tensors_norms_are_there(log, page):
    run = from_log(log, "run")
    lines = unpacked(page, "lines")
    assert lines["steps"] == sorted({*range(0, 60, 5), 31})
    for (name, *_), line in zip(unpacked(page, "tensors"), lines["rows"], strict=True):
        norms = {parts.shown(name, 80): run.grids["norm"].values(name) for name in run.grids["norm"].rows}[name]
        assert line == [pytest.approx(norm, rel=1e-2) if math.isfinite(norm) else -1 for norm in norms]
    assert sum(line.count(-1) for line in lines["rows"]) == 1


def test_of_too_many_norms_the_largest_stand(log, monkeypatch):
    run = from_log(log, "run")
    names = list(run.grids["norm"].rows)
    highest = max(map(max, tensor_lines(run, names)["rows"]))
    monkeypatch.setattr(parts, "_MAX_VALUES", 6 * len(names))
    lines = tensor_lines(run, names)
    assert len(lines["steps"]) <= 6 and lines["steps"][-1] == run.grids["norm"].steps[-1][1]
    assert sum(line.count(-1) for line in lines["rows"]) == 1 and max(map(max, lines["rows"])) == highest


def test_key_numbers_stand_on_top_and_the_verdict_once(log, page):
    run = from_log(log, "run")
    numbers = key_numbers(run, build_report(run))
    assert numbers["Final loss"] == ("0.01667", "best 0.01667 at step 59") and numbers["Steps"][0] == "60"
    assert numbers["Skipped"] == ("1", "1.67 % of the steps") and numbers["Parameters"][0] == "24"
    assert list(numbers) == ["Final loss", "Steps", "Skipped", "Clipped", "Run time", "Parameters"]
    words = page[: page.index('<script type="application/json"')]
    assert all(f"<dt>{name}</dt><dd><strong>{value}</strong>" in words for name, (value, _) in numbers.items())
    assert words.count("WARNING after 60 steps") == words.count("first in &lt;/script&gt;") == 1
    assert "<dt>last NaN</dt><dd>4</dd>" in words and "if there were 3 in a row" in words


def test_findings_are_flags_or_lines_and_do_not_cover_one_another(log):
    layout: dict = {"margin": {}}
    findings = [diagnosis.Finding("a", 0, 59), diagnosis.Finding("b", 31), diagnosis.Finding("c", 31, 31)]
    charts._mark_findings(layout, [*findings, diagnosis.Finding("d")], from_log(log, "run"))
    assert [(note["text"], note["x"]) for note in layout["annotations"]] == [("1", 29.5), ("2,3", 31)]
    assert len({note["yshift"] for note in layout["annotations"]}) == 2
    assert [(line["x0"], line["x1"]) for line in layout["shapes"]] == [(0, 59)]


def test_few_samples_are_no_chart(tmp_path):
    path = tmp_path / "run.jsonl"
    for num, drawn in ((2, ()), (3, ("loss", "norm"))):
        path.write_text("\n".join(json.dumps({"step": s, "loss": 1.0, "grad/norm": 1.0}) for s in range(num)))
        assert all((f'id="chart-{name}"' in build_page(path)) == (name in drawn) for name in ("loss", "norm", "lr"))


def test_time_since_the_first_step(tmp_path):
    path = tmp_path / "run.jsonl"
    times = [(0, 5.0), (1, 5.5), (2, 8.0), (1, 9.0), (3, 9.5)]  # a step is taken once more after a restart
    path.write_text("\n".join(json.dumps({"step": s, "time": at, "loss": 1.0, "grad/norm": 1.0}) for s, at in times))
    page = build_page(path)
    assert '"clocks":[[[0,1,2,3],[0.0,0.5,3.0,4.5]]]' in page and "<strong>4.5 s</strong>" in page


def test_several_runs_are_compared(log, tmp_path):
    lines = log.read_text().splitlines()
    other = tmp_path / "other.jsonl"
    changed = [json.loads(line) for line in lines]
    for line in changed:
        if line.get("step", 0) >= 20:
            line["loss"] = 2.0
    other.write_text("\n".join(json.dumps(line) for line in changed))
    words = build_page({"first": log, "second": other})
    assert "second: parts from first at step 20: loss 2 instead of 0.04762" in words
    assert '<th scope="row">loss last</th><td>0.01667</td><td>2</td>' in words
    assert words.index('id="chart-loss"') < words.index("Where they part") < words.index("<h2>Findings: first")


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
    "going back": [{"step": 5 + i % 10} for i in range(30)],
}


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("lines", ODD.values(), ids=ODD)
def test_odd_runs(tmp_path, lines):
    plain = {"step": 0, "loss": 1.0, "lr": 0.1, "grad/norm": 1.0}
    given = [{**plain, "step": step, **line} for step, line in enumerate(lines)]
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(json.dumps({k: v for k, v in line.items() if v is not None}) for line in given))
    words = build_page({"run": path, "again": path})
    assert f"after {len(lines)} step" in words
    assert f"the same losses and norms as run at all {len(lines)} steps in common" in words


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
    assert "<dt>cost of sinks</dt>" in page and "<small>a step on average</small>" in page


class TestRibbon:
    @pytest.mark.slow
    def test_no_step_is_lost_among_many(self):
        ribbon = Ribbon()
        for step in range(5_000_000):
            ribbon.add(step, "not finite" if step == 3_456_789 else "good")
        assert ribbon.width == 2
        worst = ribbon.worst(1000)
        place = [i for i, state in enumerate(worst) if state == "not finite"]
        assert place == [3_456_789 // 2 * 1000 // len(ribbon.states)]
        assert {state: num for state, num in ribbon.counts.items() if num} == {"good": 4_999_999, "not finite": 1}

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

    @pytest.mark.parametrize("num_logs", [1, 2])
    @pytest.mark.parametrize("to_stdout", [False, True], ids=["file", "stdout"])
    def test_no_key_and_no_title_is_obeyed_or_prevents_the_page(self, capsys, tmp_path, num_logs, to_stdout):
        logs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"][:num_logs]
        for place, path in enumerate(logs):
            settings = {"\x1b]0;pwn\x07\u202e\ud800" + "k" * 500: place, "\ud801": "\udcff\x9b"}
            lines = [{"model": {"optimizer_settings": [settings]}}, {"step": 0, "grad/norm": 1.0}]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        title = "caf\u00e9 \udcff\x1b[2J\u202e"
        output = "-" if to_stdout else tmp_path / "page.html"
        assert self.run(*logs, "--title", title, "-o", output) == 0
        page = capsys.readouterr().out if to_stdout else output.read_text(encoding="utf-8")
        assert "<h1>caf\u00e9 \\udcff\\x1b[2J\\u202e</h1>" in page
        assert (r'<th scope="row">optimizer \x1b]0;pwn\x07\u202e' in page) == (num_logs == 2)
        assert [one for one in page if not one.isprintable() and one != "\n"] == []

    @pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
    def test_a_link_to_nothing_is_not_followed(self, log, capsys, tmp_path):
        copy, link, target = tmp_path / "run.jsonl", tmp_path / "run.html", tmp_path / "elsewhere"
        shutil.copy(log, copy)
        link.symlink_to(target)
        assert self.run(copy) == 3
        assert "exists already" in capsys.readouterr().err
        with pytest.raises(FileExistsError):
            save_page("text", link)
        assert not target.exists()
        assert self.run(copy, "--force") == 0 and target.is_file() and link.is_symlink()

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
    save_page("text", link, force=True)
    assert link.is_symlink() and target.read_text() == "text"
