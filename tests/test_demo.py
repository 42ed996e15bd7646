"""The demo keeps what it promises: the poisoned step is skipped, the right tensor is named, training goes on."""

import functools
import math
import os
import sys

import pytest

import fastguard
from fastguard.commands import cli
from fastguard.commands.demo import training
from fastguard.commands.demo.training import CharTransformer
from fastguard.sinks import read_jsonl

from records import make_record

STEPS = 40


@pytest.fixture
def tiny(monkeypatch, threads):
    """A model that trains in no time; its middle block is the one that is poisoned."""
    monkeypatch.setattr(training.logging.getLogger("fastguard"), "handlers", [])
    monkeypatch.setattr(training, "CharTransformer", functools.partial(CharTransformer, width=32, num_blocks=3))


def run_demo(folder, *arguments):
    return cli.main(["demo", "--quick", "--steps", str(STEPS), "--out", str(folder), *arguments])


@pytest.mark.parametrize("backend", ["auto", pytest.param("reference", marks=pytest.mark.slow)])
def test_a_tiny_run(tiny, tmp_path, capsys, monkeypatch, backend):
    monkeypatch.setenv("FASTGUARD_BACKEND", backend)
    monkeypatch.setitem(sys.modules, "plotly", None)  # its page has a test of its own
    assert run_demo(tmp_path) == 0
    text = capsys.readouterr().out

    log = read_jsonl(tmp_path / "run.jsonl")
    assert [line["step"] for line in log] == list(range(STEPS))
    assert [line["step"] for line in log if line["skipped"]] == [STEPS // 2]
    bad = log[STEPS // 2]
    assert bad["nonfinite"][0] == "blocks.1.mlp.2.bias"
    assert not any(name.startswith(("blocks.2", "norm", "head")) for name in bad["nonfinite"])
    assert math.isfinite(bad["loss"])
    losses = [line["loss"] for line in log]
    assert losses[0] > 5 and sum(losses[-5:]) / 5 < losses[0] - 1
    assert sum("val_loss" in line for line in log) >= 5 and "val_loss" in log[-1]

    assert f"fastguard: step {STEPS // 2}: gradients are not finite (first in 'blocks.1.mlp.2.bias'" in text
    assert "bit-identical to\n  before" in text
    assert f"WARNING after {STEPS} steps: " in text and "step   39 of 40: loss " in text
    assert "[warning] non-finite-gradients, step 20, in blocks.1.mlp.2.bias" in text
    log_is, page_is = text.splitlines()[-2:]
    assert log_is.endswith(f"the log is {tmp_path / 'run.jsonl'}")
    assert page_is.startswith("fastguard report ") and "makes a page of it; it needs plotly" in page_is
    assert os.listdir(tmp_path) == ["run.jsonl"]


class TestPage:
    """What stands last names the page of the run, or says how to get it."""

    @pytest.fixture
    def log(self, tmp_path):
        with fastguard.JsonlSink(tmp_path / "run.jsonl") as sink:
            for step in range(30):
                sink.write(make_record(step, loss=1.0))
        return tmp_path / "run.jsonl"

    @pytest.fixture(autouse=True)
    def extra(self):
        pytest.importorskip("plotly", reason="the page is an extra: pip install fastguard[report]")

    def test_is_named(self, log):
        path = log.with_name("run.html")
        assert training.page_line(log, path) == f"the page, to open in a browser: {path}" and path.is_file()

    def test_that_cannot_be_written(self, log):
        told = training.page_line(log, log / "run.html")
        assert told.startswith(f"fastguard report {log} makes a page of it; FileExistsError: ")


def test_the_demo_fails_when_the_poisoned_step_is_not_skipped(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fastguard, "wrap", functools.partial(fastguard.wrap, skip_nonfinite=False))
    assert run_demo(tmp_path) == 1
    text = capsys.readouterr().out
    assert "NOT AS IT SHOULD BE: skipped False" in text
    assert f"THE DEMO FAILED at step {STEPS // 2}" in text


def test_what_cannot_be_had_is_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as end:
        run_demo(tmp_path / "file")
    assert end.value.code == 64 and "--out: cannot write there" in capsys.readouterr().err
    monkeypatch.setenv("FASTGUARD_BACKEND", "abacus")
    assert run_demo(tmp_path) == 64
    assert "`FASTGUARD_BACKEND` must be one of" in capsys.readouterr().err
