"""A report shows itself: in a notebook, as a file, in one line; with the extra and without."""

import copy
import gc
import pickle
import sys

import pytest
import torch

import fastguard
from fastguard.report import build_report


def trained(num_steps=12, **settings):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = fastguard.wrap(torch.optim.SGD([("<b>w", weight)], lr=0.1), **settings)
    for step in range(num_steps):
        weight.grad = torch.full((4,), float("nan") if step == 5 else 1.0 + step)
        optimizer.step()
        optimizer.guard.observe(loss=2.0 / (step + 1))
    return optimizer


@pytest.fixture
def without_plotly(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)


def test_one_short_line():
    report = trained().guard.report()
    assert (
        repr(report) == f"<Report: warning, 12 steps, {len(report.findings)} finding{'s' * (len(report.findings) > 1)}>"
    )
    assert repr(build_report(fastguard.TrainingHistory())) == "<Report: no-evidence, 0 steps, 1 finding>"


def test_a_notebook_gets_key_numbers(without_plotly, tmp_path):
    report = trained(max_norm=1.0, sinks=[fastguard.JsonlSink(tmp_path / "run.jsonl")]).guard.report()
    shown = report._repr_html_()
    assert shown.startswith('<p class="verdict warning"><strong>WARNING after 12 steps')
    assert (
        ">[warning] non-finite-gradients, step 5, in &lt;b&gt;w</h3>" in shown and '<th scope="row">loss</th>' in shown
    )
    assert len(shown) < 50_000 and "script" not in shown and "iframe" not in shown
    with pytest.raises(ImportError, match=r"pip install .fastguard\[report\]"):
        report.save(tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_beside_it_a_notebook_gets_the_text():
    class Printer:
        text = staticmethod(lambda text: said.append(text))

    said = []
    report = trained().guard.report()
    report._repr_pretty_(Printer(), cycle=False)
    assert said == [str(report)]


def test_nothing_to_draw_is_told_in_words():
    assert (
        build_report(fastguard.TrainingHistory())
        ._repr_html_()
        .startswith('<p class="verdict no-evidence"><strong>NOTHING')
    )


def test_saved(tmp_path):
    pytest.importorskip("plotly", reason="the page is an extra: pip install fastguard[report]")
    report = trained(sinks=[fastguard.JsonlSink(tmp_path / "run.jsonl")]).guard.report()
    gc.collect()  # guard and optimizer are gone; the report holds neither
    path = report.save(tmp_path / "report.html", title="a <title>")
    assert path == tmp_path / "report.html" and "<h1>a &lt;title&gt;</h1>" in path.read_text()
    before = path.read_text()
    assert report.save(path) == path and path.read_text() != before


def test_a_report_keeps_no_guard_alive():
    optimizer = trained()
    report = optimizer.guard.report()
    assert report.source() is optimizer.guard
    del optimizer
    gc.collect()
    assert isinstance(report.source(), fastguard.TrainingHistory)


def test_copies_have_no_source():
    report = trained().guard.report()
    for twin in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert twin == report and twin.source is None and str(twin) == str(report)
        with pytest.raises(ValueError, match="no recorded steps to plot"):
            twin.save("nowhere.html")
