"""The page of a run: what a reader sees, that names are text only, and that it loads nothing from the network."""

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

pytest.importorskip("plotly", reason="the page is an extra: pip install fastguard[report]")

from fastguard.page import build_page, save_page

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
    return build_page(log)


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def page_of(path, lines, **options):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Page(build_page(path, **options))


class TestWords:
    def test_verdict_findings_numbers_and_figures(self, page):
        for needed in (
            "WARNING after 60 steps: 1 warning",
            "[warning] non-finite-gradients, step 31, in </script>",
            "what to do: Look at the data",
            "last_num_nans 4",
            "steps 60, the last is step 59",
            "loss last 0.01667, lowest 0.01667",
        ):
            assert needed in page.words
        assert page.words.count("WARNING after 60 steps") == 1
        assert page.titles() == ["Loss", "Gradient norm", "Clip rate", "Learning rate", "Gradient norm"]
        plots = [one for _, one in page.elements if (one.get("class") or "").startswith("plot")]
        assert [one["aria-label"] for one in plots] == page.titles() and {one["role"] for one in plots} == {"img"}

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
        assert "cost of sinks mean" in words and "cost of guarding median" in words

    def test_charts_need_three_samples(self, tmp_path):
        lines = [{"step": s, "loss": 1.0, "grad/norm": 1.0} for s in range(3)]
        assert page_of(tmp_path / "run.jsonl", lines[:2]).charts == []
        assert page_of(tmp_path / "run.jsonl", lines).titles() == ["Loss", "Gradient norm"]


class TestSafety:
    def test_names_are_text(self, page, text):
        scripts = [attributes for tag, attributes in page.elements if tag == "script"]
        assert not any("src" in attributes for attributes in scripts)
        assert sum("type" not in attributes for attributes in scripts) == 1
        assert not any(tag in ("img", "b") for tag, _ in page.elements)
        assert "\u202e" not in text and "\x1b" not in text

    def test_it_loads_nothing_from_the_network(self, page):
        policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "http" not in policy and "unsafe-eval" not in policy
        assert not any(key in one for _, one in page.elements for key in ("src", "href", "action", "data"))

    def test_the_same_log_gives_the_same_page(self, log, text):
        assert len(text) < 2.6e6  # 1.5 MB over plotly's basic bundle
        assert build_page(log) == text


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
    words = Page(build_page(path)).words
    assert f"after {len(lines)} step" in words


class TestCommand:
    def run(self, *arguments):
        return cli.main(["report", *map(str, arguments)])

    def test_beside_the_log(self, log, capsys, tmp_path, monkeypatch):
        copy, page = tmp_path / "run.jsonl", tmp_path / "run.html"
        shutil.copy(log, copy)
        assert self.run(copy) == 0
        assert capsys.readouterr().out.strip() == str(page)
        with monkeypatch.context() as patch:  # it says so before it reads the log
            patch.setattr(diagnose, "run_of", lambda *arguments: pytest.fail("read"))
            assert self.run(copy) == 3
        assert "exists already: use --force" in capsys.readouterr().err
        assert self.run(copy, "-f") == 0
        assert page.stat().st_mode & 0o777 == 0o666 & ~_umask()
        before = copy.read_bytes()
        assert self.run(copy, "-f", "-o", copy) == 3 and copy.read_bytes() == before
        assert sorted(p.name for p in tmp_path.iterdir()) == ["run.html", "run.jsonl"]

    def test_as_json_and_with_an_exit_code(self, log, capsys):
        assert self.run(log, "--json", "--fail-on", "warning") == 1
        assert json.loads(capsys.readouterr().out)["status"] == "warning"
        assert self.run(log, "--json", "--fail-on", "critical") == 0

    @pytest.mark.parametrize("to_stdout", [False, True], ids=["file", "stdout"])
    def test_no_key_and_no_title_is_interpreted_or_prevents_the_page(self, capsys, tmp_path, to_stdout):
        log = tmp_path / "caf\u00e9 \x1b[2J\u202e.jsonl"
        settings = {"\x1b]0;pwn\x07\u202e\ud800" + "k" * 500: 1.0, "\ud801": "\udcff\x9b"}
        lines = [{"model": {"optimizer_settings": [settings]}}, {"step": 0, "grad/norm": 1.0}]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        output = "-" if to_stdout else tmp_path / "page.html"
        assert self.run(log, "-o", output) == 0
        text = capsys.readouterr().out if to_stdout else output.read_text(encoding="utf-8")
        assert "\\x1b[2J\\u202e</h1>" in text
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


def _umask():
    now = os.umask(0)
    os.umask(now)
    return now
