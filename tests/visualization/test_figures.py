"""Figures from any source: what they show, what they mark, and that nothing is lost."""

import json
import math

import pytest
import torch

import fastguard
from fastguard import visualization

plotly = pytest.importorskip("plotly", reason="figures are an extra: pip install fastguard[report]")

BAD = {7: math.nan, 8: math.nan, 11: math.inf}
NUM_STEPS = 40
BY_STEP = (
    visualization.plot_loss,
    visualization.plot_gradient_norm,
    visualization.plot_clip_rate,
    visualization.plot_learning_rate,
    visualization.plot_updates,
)
BY_LAYER = (visualization.plot_gradient_flow, visualization.plot_layers, visualization.plot_activations)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A guard with a log, and the log's path: three of its steps are not finite, one validation in ten."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = fastguard.wrap(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model,
        max_norm=0.5,
        sinks=[fastguard.JsonlSink(path, tensors_every=5)],
        activations=True,
        weights=5,
        max_consecutive_skips=50,
    )
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = (model(torch.randn(8, 4)) - 1.0).square().mean()
        loss.backward()
        if step in BAD:
            model[0].weight.grad[0, 0] = BAD[step]
        optimizer.step()
        optimizer.guard.observe(loss=loss, val_loss=2.0 if step % 10 == 0 else None)
    optimizer.guard.flush()
    return optimizer, path


def traces(figure):
    """By name; all of a figure is JSON, as a page, a notebook and a tracker need it."""
    json.loads(figure.to_json())
    return {trace.name: trace for trace in figure.data}


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("plot", [*BY_STEP, *BY_LAYER])
def test_whatever_it_is_given(trained, plot):
    optimizer, path = trained
    given = (optimizer, optimizer.guard, optimizer.guard.history, path, str(path))
    drawn = [plot(source) for source in given]
    assert all(figure.data for figure in drawn)
    assert drawn[1].to_json() == drawn[0].to_json() == drawn[3].to_json() == drawn[4].to_json()


def test_norms_and_losses_are_those_of_the_log(trained):
    _, path = trained
    found, losses = traces(visualization.plot_gradient_norm(path)), traces(visualization.plot_loss(path))
    log = fastguard.sinks.read_jsonl(path)
    good = [line for line in log if math.isfinite(line["grad/norm"])]
    assert list(found["norm"].y) == [line["grad/norm"] for line in good]
    assert list(found["norm after clipping"].y) == pytest.approx([x["grad/norm"] * x["clip/coef"] for x in good])
    assert set(found["clip limit 0.5"].y) == {0.5}
    assert list(losses["loss"].y) == [line["loss"] for line in log]
    assert list(losses["validation loss"].x) == [0, 10, 20, 30]


def test_the_rate_of_clipping_is_that_of_the_log(trained, tmp_path):
    _, path = trained
    found = traces(visualization.plot_clip_rate(path))["clipped"]
    log = fastguard.sinks.read_jsonl(path)
    clipped = {line["step"] for line in log if line["clipped"] and not line["skipped"]}
    assert 0 < len(clipped) < NUM_STEPS
    shares = [len(clipped & set(range(step - 19, step + 1))) / min(20, step + 1) for step in range(NUM_STEPS)]
    assert list(found.y) == pytest.approx(shares) and list(found.x) == list(range(NUM_STEPS))
    lines = [{"step": s, "grad/norm": 2.0, "clip/coef": 1.0 if s % 4 else 0.5} for s in range(1000)]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shares = traces(visualization.plot_clip_rate(tmp_path / "long.jsonl"))["clipped"].y
    assert len(shares) == 1000 and min(shares[50:]) >= 0.24 and max(shares[50:]) <= 0.26  # of the 50 steps up to each
    (tmp_path / "short.jsonl").write_text(json.dumps(lines[1]))
    with pytest.raises(ValueError, match="no step was clipped"):
        visualization.plot_clip_rate(tmp_path / "short.jsonl")


def test_loss_scales(tmp_path):
    path = tmp_path / "run.jsonl"
    lines = [{"step": s, "grad/norm": 1.0, "loss_scale": 65536.0 / 2 ** (s // 10)} for s in range(40)]
    path.write_text("\n".join(map(json.dumps, lines)))
    figure = visualization.plot_loss_scale(path)
    assert list(traces(figure)["loss scale"].y) == [line["loss_scale"] for line in lines]
    assert figure.layout.yaxis.type == "log"
    path.write_text(json.dumps({"step": 0, "grad/norm": 1.0}))
    with pytest.raises(ValueError, match="no step had a loss scale"):
        visualization.plot_loss_scale(path)


def test_every_step_that_is_not_finite_is_marked(trained):
    optimizer, path = trained
    for source in (path, optimizer.guard.history):
        found = traces(visualization.plot_gradient_norm(source))
        assert list(found["NaN (2)"].x) == [7, 8]
        assert list(found["Inf (1)"].x) == [11]
        assert list(found["skipped (3)"].x) == [7, 8, 11]
    history = fastguard.TrainingHistory()
    for step, loss in enumerate([1.0, math.nan, 0.5, -math.inf]):
        history.record(step, loss=loss, grad_norm=1.0, lr=0.1)
    found = traces(visualization.plot_loss(history))
    assert list(found["loss"].x) == [0, 2] and list(found["loss not finite (2)"].x) == [1, 3]


@pytest.mark.parametrize("value", ["norm", "update", "zeros", "max", "saturation"])
def test_layers_stand_in_the_order_of_the_model(trained, value):
    _, path = trained
    heat = visualization.plot_layers(path, value).data[0]
    expected = {"saturation": ("1",)}.get(value, ("0.weight", "0.bias", "2.weight", "2.bias"))
    assert [name for name in heat.y if name in expected] == list(expected)
    assert len(heat.z) == len(heat.y) and all(len(row) == len(heat.x) for row in heat.z)


def test_what_is_not_finite_is_red_and_told(trained):
    _, path = trained
    figure = visualization.plot_layers(path)
    bad = traces(figure)["NaN or Inf"]
    assert {(name, step) for name, row in zip(bad.y, bad.z) for step, one in zip(bad.x, row) if one} == {
        ("0.weight", step) for step in BAD
    }
    assert "0.weight: NaN or Inf" in bad.text[list(bad.y).index("0.weight")]


def test_a_group_shows_its_worst_and_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(visualization.figures, "MAX_ROWS", 10)
    names = [f"layers.{i}.weight" for i in range(100)]
    parameters = [(name, torch.nn.Parameter(torch.zeros(2))) for name in names]
    sink = fastguard.JsonlSink(tmp_path / "run.jsonl")
    optimizer = fastguard.wrap(torch.optim.SGD([{"params": parameters}], lr=0.1), sinks=[sink])
    for i, (_, parameter) in enumerate(parameters):
        parameter.grad = torch.full((2,), 100.0 if i == 57 else 1.0)
    optimizer.step()
    heat = visualization.plot_layers(optimizer, "max").data[0]
    assert len(heat.y) == 10
    assert [row[0] for row in heat.z] == pytest.approx([2.0 if place == 5 else 0.0 for place in range(10)])
    assert heat.text[5][0] == "layers.57.weight: 100"


def test_long_runs_are_bounded_and_keep_what_happened_once():
    history = fastguard.visualization.runs.DrawnRun("long")
    for step in range(50_000):
        norm = math.nan if step == 31_007 else 1e6 if step == 12_345 else 1.0 + step % 7
        history.extend([fastguard.records.Entry(step, norm, 1.0, math.isnan(norm), 1.0, None, 0.1, None, None)])
    found = traces(visualization.plot_gradient_norm(history))
    band = found["norm: smallest to largest"]
    assert len(band.x) <= 4100
    assert max(band.y) == 1e6
    assert list(found["NaN (1)"].x) == [31_007]


def test_several_runs(trained):
    optimizer, path = trained
    named = traces(visualization.plot_loss({"first": path, "second": optimizer.guard.history}))
    assert {"first, loss", "second, loss"} <= set(named)
    name, found = f"{path.parent.name}/run", traces(visualization.plot_gradient_norm([path, path]))
    assert {f"{name}, norm", f"{name} (2), norm"} <= set(found)


def test_names_are_escaped():
    figure = visualization.plot_loss({"</script><b>\x1b[31m": a_step(), "b": a_step()})
    names = [trace.name for trace in figure.data]
    assert not any("<" in name or "\x1b" in name for name in names)


def test_a_range_test():
    result = fastguard.LearningRateFinder(1e-4, 1.0, 20).range_test(lambda lr: 1 / (1 + (lr / 0.1) ** 2))
    found = traces(visualization.plot_lr_finder(result))
    assert list(found["loss"].y) == result.losses
    assert set(found[f"suggested {result.suggested_lr:.3g}"].x) == {result.suggested_lr}


def a_step():
    history = fastguard.TrainingHistory()
    history.record(0, loss=1.0, grad_norm=1.0, lr=0.1)
    return history


@pytest.mark.parametrize(
    ("plot", "error", "said"),
    [
        (lambda path: visualization.plot_loss(fastguard.TrainingHistory()), ValueError, "holds no step yet"),
        (lambda path: visualization.plot_loss(3), TypeError, "got int"),
        (lambda path: visualization.plot_loss([path] * 9), ValueError, "1 to 8 runs, got 9"),
        (lambda path: visualization.plot_layers([path] * 2), ValueError, "one run, got 2"),
        (lambda path: visualization.plot_layers(path, "speed"), ValueError, "must be one of norm, update"),
        (lambda path: visualization.plot_activations(a_step()), ValueError, "has no samples of this"),
        (lambda path: visualization.plot_updates(a_step()), ValueError, "no update was measured"),
        (lambda path: visualization.plot_gradient_flow(a_step()), ValueError, "no table of tensors"),
        (lambda path: visualization.plot_loss(path.with_name("no.jsonl")), FileNotFoundError, "no.jsonl"),
    ],
)
def test_sources_without_a_figure(trained, plot, error, said):
    with pytest.raises(error, match=said):
        plot(trained[1])
