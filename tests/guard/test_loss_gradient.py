"""What is noted of a loss from the gradient of the outputs: any layout and value, how much is copied, what is held."""

import itertools
import math
import weakref

import pytest
import torch
from guard_helpers import Allocations, classes, guarded_model, make_model, needs_extension, numbers
from torch import nn
from torch.nn import functional as F

import fastguard
from fastguard.observers.loss_gradient import LossGradient, OutputSample
from fastguard.records.failures import Failures

pytestmark = needs_extension
CROSS_ENTROPY = "cross-entropy"


SQUARED = {
    "itself": lambda y: F.mse_loss(y, 5 + numbers(32, seed=2)),
    "smooth": lambda y: F.smooth_l1_loss(y, 3 * numbers(32, seed=2)),
    "exponential": lambda y: y.exp().mean(),
    "sum of squares": lambda y: F.mse_loss(y, numbers(32, seed=2), reduction="sum"),
    "fourth power": lambda y: (y - numbers(32, seed=2)).pow(4).mean(),
}


@pytest.mark.parametrize("name", SQUARED)
def test_what_counts_as_a_squared_error_until_the_loss_is_not_what_that_would_have_been(name):
    looker, targets = LossGradient(Failures()), 5 + numbers(32, seed=2)
    looker.watch(output := numbers(32).requires_grad_() * 1.0)
    loss = SQUARED[name](output)
    loss.backward()
    facts, value = looker.facts, float(loss.detach())
    [then] = facts["squared_losses"]
    assert facts["loss_kind"] == "squared error" and (abs(value - then) <= 1e-5 * then) is (name == "itself")
    if name == "itself":
        assert facts["target_mean"] == pytest.approx(float(targets.mean()), abs=1e-5)
        assert facts["target_std"] == pytest.approx(float(targets.std(correction=0)), abs=1e-5)
        assert facts["target_range"] == pytest.approx((float(targets.min()), float(targets.max())), abs=1e-5)
        assert facts["target_binary_share"] == 0.0
    else:
        assert abs(value - then) > 2e-3 * then


OUTPUTS = {
    "a loss first": lambda y: {"loss": y.sum() * 0.0, "logits": y},
    "nested": lambda y: (None, [y], 3),
    "integers first": lambda y: {"ids": torch.ones(3, dtype=torch.long), "logits": y},
    "a constant first": lambda y: (torch.ones(16, 4), y),  # which has no gradient
    "a scalar": lambda y: y.sum(),
    "complex": lambda y: torch.ones(4, dtype=torch.complex64, requires_grad=True),
    "a parameter": lambda y: nn.Parameter(torch.ones(4)),
    "text": lambda y: "text",
    "nothing": lambda y: {},
}


class TestWatch:
    @pytest.mark.parametrize("name", OUTPUTS)
    def test_the_first_tensor_that_has_dimensions_and_a_gradient(self, name):
        looker, y = LossGradient(Failures()), make_model()(numbers(16, 6))
        looker.watch(OUTPUTS[name](y))
        F.cross_entropy(y, classes(16, num=4)).backward()
        assert looker.facts.get("loss_kind") == (CROSS_ENTROPY if "first" in name or name == "nested" else None)

    def test_target_shares_within_a_batch_and_over_all(self):
        looker, model = LossGradient(Failures()), make_model()
        for step in range(4):
            y = model(numbers(16, 6, seed=step))
            looker.watch(y)
            F.cross_entropy(y, torch.full((16,), step)).backward()
        facts = looker.facts
        assert (facts["target_batch_top_share"], facts["target_top_share"]) == (1.0, 0.25)
        assert (facts["num_targets"], facts["num_target_classes"]) == (64, 4)

    @pytest.mark.parametrize("kind", ["classes", "numbers", "symbols", "elsewhere", "single", "alike"])
    def test_whether_an_input_is_the_target(self, kind):
        looker, width = LossGradient(Failures()), 1 if kind in ("numbers", "single") else 4
        for step in range(3):
            x, labels = numbers(16, 6, seed=step), classes(16, num=4)
            place = step if kind == "elsewhere" else 2
            if kind in ("classes", "elsewhere"):
                x[:, place] = 4.0 * labels - 2.0
            y = numbers(16, width, seed=9).requires_grad_()
            if kind in ("numbers", "single"):
                x = x[:, 2:3] if kind == "single" else x
                looker.watch(given := y * 1.0, [x])
                F.mse_loss(given, 3.0 * x[:, -1:] + 1.0).backward()
                continue
            if kind in ("symbols", "alike"):
                x = torch.randint(4, (16, 5)) if kind == "symbols" else torch.ones(16, 5, dtype=torch.long)
                y = numbers(16, 5, width, seed=9).requires_grad_()
                looker.watch(given := y * 1.0, [x])
                F.cross_entropy(given.flatten(0, 1), x.flatten()).backward()
                continue
            looker.watch(given := y * 1.0, [x])
            F.cross_entropy(given, labels).backward()
        found = looker.facts.get("target_in_inputs")
        if kind in ("single", "alike"):
            assert found is None  # a line through one feature, and one symbol, say nothing
        else:
            assert (found is not None and found > 0.9995) == (kind != "elsewhere")


def train(scaler=None, **options):
    """A guard over some steps of a classifier."""
    model, optimizer = guarded_model(lambda p: torch.optim.SGD(p, lr=0.01), **options)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for step in range(40):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(numbers(16, 6, seed=step)), classes(16, num=4, seed=step))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.guard.observe(loss=loss)
    optimizer.guard.report()
    return optimizer.guard


class TestUnderGuard:
    def test_notes_are_the_same_under_a_scale_and_in_the_log(self, tmp_path):
        guard = train(sinks=[fastguard.JsonlSink(tmp_path / "run.jsonl")])
        guard.close()
        notes = guard.history.model
        assert notes.loss_kind == CROSS_ENTROPY and (notes.num_target_classes, notes.num_targets) == (4, 4 * 16)
        assert 0.25 <= notes.target_top_share <= notes.target_batch_top_share < 1.0
        scaled = train(scaler=torch.amp.GradScaler("cpu", init_scale=1024.0)).history.model
        read = fastguard.TrainingHistory.from_jsonl(tmp_path / "run.jsonl").model
        for name in ("loss_kind", "num_targets", "num_target_classes", "target_top_share", "target_batch_top_share"):
            assert getattr(scaled, name) == getattr(read, name) == getattr(notes, name)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def loss_of(y, loss):
    return OutputSample(y).loss_of(gradient_of(loss, y))


def gradient_of(loss, y):
    leaf = y.clone().requires_grad_()
    loss(leaf).backward()
    assert leaf.grad is not None
    return leaf.grad


LOSSES = {
    "classes second": lambda y: F.cross_entropy(y, classes(y.shape[0], *y.shape[2:], num=y.shape[1])),
    "smoothed": lambda y: F.cross_entropy(y, classes(y.shape[0], *y.shape[2:], num=y.shape[1]), label_smoothing=0.1),
    "with logits": lambda y: F.binary_cross_entropy_with_logits(y, classes(*y.shape, num=2).to(y.dtype)),
    "squared": lambda y: F.mse_loss(y, numbers(*y.shape, seed=3).to(y.dtype)),
}


class TestAnyGradient:
    @pytest.mark.parametrize("shape", [(1,), (7,), (1, 1), (1, 2), (16, 1), (2, 3, 4, 5), (70000,)], ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, -math.inf, 6e4, 6e-8, -0.0])
    def test_any_value_is_read(self, bad, dtype, shape):
        for which, share in itertools.product(("output", "gradient"), (0.02, 1.0)):
            given = {"output": numbers(*shape).to(dtype), "gradient": numbers(*shape, seed=9).to(dtype)}
            given[which][torch.rand(shape, generator=torch.Generator().manual_seed(0)) < share] = bad
            loss = OutputSample(given["output"]).loss_of(given["gradient"])
            if not math.isfinite(bad) and share == 1.0:
                assert (loss.kind, loss.targets) == ("", None)

    @pytest.mark.thinned(n=3)
    @pytest.mark.parametrize("shape", [(16, 6), (4, 6, 3, 5), (64, 6, 40, 40), (3, 6, 5000)], ids=str)
    @pytest.mark.parametrize("layout", ["transposed", "strided", "channels last", "expanded"])
    def test_layouts(self, shape, layout):
        def laid_out(x):
            if layout == "transposed":
                return x.mT.contiguous().mT
            if layout == "strided":
                return x.repeat_interleave(3, -1)[..., ::3]
            if layout == "channels last" and x.dim() == 4:
                return x.contiguous(memory_format=torch.channels_last)
            return x[:1].expand(x.shape)

        for name in LOSSES:
            y = laid_out(numbers(*shape))
            g = laid_out(gradient_of(LOSSES[name], y.contiguous()))
            found, expected = (OutputSample(a).loss_of(b) for a, b in ((y, g), (y.contiguous(), g.contiguous())))
            assert found[:5] == expected[:5] and found.kind
            assert found.mean_squared == pytest.approx(expected.mean_squared, rel=1e-6, nan_ok=True)
            assert found.numbers == pytest.approx(expected.numbers, rel=1e-9, abs=1e-12)


class TestSampled:
    """Of outputs that are too large to be copied whole."""

    @pytest.mark.parametrize(
        ("smoothing", "dtype"), [(0.0, torch.float32), (0.0, torch.bfloat16), (0.1, torch.float32)], ids=str
    )
    def test_classes_of_a_large_vocabulary(self, smoothing, dtype):
        y, targets = numbers(3, 40, 20011), classes(120, num=20011)
        targets[:30] = -100
        sample = OutputSample(y.to(dtype))
        gradient = gradient_of(lambda y: F.cross_entropy(y.flatten(0, 1), targets, label_smoothing=smoothing), y)
        loss = sample.loss_of(gradient.to(dtype))
        assert loss.kind == ("cross-entropy with smoothed labels" if smoothing else "cross-entropy")
        assert loss.targets is not None and list(loss.targets) == targets[30:].tolist()
        assert not loss.is_sampled and list(loss.places or ()) == list(range(30, 120))

    @pytest.mark.parametrize("is_channels_last", [False, True])
    def test_classes_of_pixels(self, is_channels_last):
        y, targets = numbers(2, 21, 128, 120), classes(2, 128, 120, num=21)
        targets[:, :50] = 3
        if is_channels_last:
            y = y.contiguous(memory_format=torch.channels_last)
        sample = OutputSample(y)
        loss = sample.loss_of(gradient_of(lambda y: F.cross_entropy(y, targets), y))
        assert loss.kind == "cross-entropy" and loss.targets is not None and loss.is_sampled
        assert len(loss.targets) > 1000
        share = sum(found == 3 for found in loss.targets) / len(loss.targets)
        assert share == pytest.approx(float((targets == 3).double().mean()), abs=0.03)

    @pytest.mark.parametrize("shape", [(400000,), (500, 800), (4, 3, 200, 200), (2, 300000)], ids=str)
    def test_squared_error(self, shape):
        y, targets = numbers(*shape), 3.0 + 2.0 * numbers(*shape, seed=1)
        loss = loss_of(y, lambda y: F.mse_loss(y, targets))
        assert loss.kind == "squared error"
        assert loss.mean_squared == pytest.approx(float(F.mse_loss(y, targets)), rel=1e-4)  # of all elements
        assert loss.numbers[2:4] == pytest.approx((3.0, 2.0), abs=0.05)

    @pytest.mark.parametrize("is_shifted", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_tokens_that_are_to_be_given_back(self, is_shifted):
        looker = LossGradient(Failures())
        for seed in range(3):
            tokens = classes(8, 32, num=9001, seed=seed)
            targets = tokens.roll(-1, 1) if is_shifted else tokens.clone()
            targets[:, :3] = -100
            looker.watch(y := numbers(8, 32, 9001).requires_grad_() * 1.0, [tokens])
            F.cross_entropy(y.flatten(0, 1), targets.flatten()).backward()
        assert looker.facts["loss_kind"] == "cross-entropy"
        assert (looker.facts["target_in_inputs"] == 1.0) != is_shifted


@pytest.mark.parametrize(
    ("shape", "input_shape"),
    [
        ((64, 10), (64, 20)),
        ((2, 128, 50257), (2, 128)),
        ((2, 21, 256, 256), (2, 3, 256, 256)),
        ((64, 1000), (64, 3, 96, 96)),
        ((65536,), (65536, 1)),
        ((8, 300000), (8, 8192)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_at_most_a_mebibyte_or_one_percent_is_copied(shape, input_shape, dtype):
    y, x = torch.zeros(shape, dtype=dtype, requires_grad=True) * 1.0, torch.ones(input_shape, dtype=dtype)
    gradient, looker = torch.full_like(y, 1e-3), LossGradient(Failures())
    gradient.view(-1)[::2] *= -1.0
    with Allocations() as copied:
        looker.watch(y, [x, x])
        [hook] = y._backward_hooks.values()
        hook(gradient)
    assert looker.facts["loss_kind"]
    assert 0 < copied.num_bytes <= max(1 << 20, y.nbytes // 100)


@pytest.mark.parametrize("ending", ["a step", "no backward pass", "an error"])
def test_nothing_is_held_of_a_pass_and_its_inputs(ending):
    """By the hook of a pass that is looked at, the first; what a guard holds beside it is all the same."""
    model, optimizer = guarded_model(lambda p: torch.optim.SGD(p, lr=0.01))
    x = numbers(16, 6)
    y = model(x)
    held = [weakref.ref(x), weakref.ref(y)]  # the graph holds x too
    if ending == "a step":
        F.cross_entropy(y, classes(16, num=4)).backward()
    elif ending == "an error":
        with pytest.raises(IndexError):
            F.cross_entropy(y, classes(16, num=4) + 10)
    del x, y
    assert [one() for one in held] == [None] * 2
    optimizer.step()
    assert "failed-parts" not in [finding.rule for finding in optimizer.guard.report().findings]
