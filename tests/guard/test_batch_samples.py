"""What is read of what goes into a model and comes out of it, of running statistics, and of single elements."""

import dataclasses
import json
import math
from typing import NamedTuple

import pytest
import torch
from guard_helpers import needs_extension, numbers
from torch import nn

import fastguard
from fastguard.diagnosis import by_sign, diagnose
from fastguard.observers import batch_sample
from fastguard.observers.batch_sample import data_of, figures_of
from fastguard.records import ModelNotes

pytestmark = needs_extension


def sample_of(args, kwargs, y, training, with_grad):
    return batch_sample.sample_of(data_of(args, kwargs), y, training, with_grad)


def sampled(x, y, **kwargs):
    found = sample_of((x,), kwargs, y, True, True)
    assert found is not None
    return found


def test_figures():
    x = torch.tensor([[1.0, 2.0, -3.0, 7.0], [1.0, 4.0, -3.0, math.nan]])
    y = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    found = sampled(x, y)
    assert (found.num_samples, found.input_abs_max, found.input_num_nonfinite) == (2, 7.0, 1)
    assert found.input_mean == pytest.approx(9 / 7) and found.input_constant_share == 0.5
    assert (found.output_min, found.output_max, found.output_width) == (0.25, 0.75, 2)
    assert (found.output_mean, found.output_spread) == (0.5, pytest.approx(0.125))
    assert (found.output_is_unit, found.output_rows_sum_to_one, found.input_is_integer) == (True, True, False)
    assert all(math.isnan(sampled(x, y).output_spread) for y in (object(), torch.ones(2).long()))  # the inputs alone


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7, 3), (1, 9, 1000), (2, 3, 70_000), (600, 50), (3, 5, 4, 11)])
def test_outputs_of_a_softmax_add_up_to_one(dtype, shape):
    y = torch.randn(shape).to(dtype).softmax(-1)
    found = sampled(torch.randn(shape[0], 2), y)
    assert found.output_is_unit and found.output_width == shape[-1]
    assert found.output_rows_sum_to_one is (shape[-1] <= 65536)
    assert not sampled(torch.randn(shape[0], 2), torch.randn(shape).to(dtype).sigmoid()).output_rows_sum_to_one


def test_equal_batches_have_equal_digests():
    y = torch.ones(64, 1)
    images = torch.randn(64, 3, 32, 32)
    assert sampled(images, y).input_digest == sampled(images.clone(), y).input_digest
    tokens = torch.randint(0, 1000, (64, 100))
    others = [images.flip(0), images * 2, images.double(), images.reshape(64, -1), tokens, tokens.flip(0), tokens.int()]
    digests = {sampled(x, y).input_digest for x in (images, *others)}
    assert len(digests) == 7 and all(0 <= digest < 2**63 for digest in digests)
    digits = torch.rand(2, 64, 8, 8)
    digits[..., 0] = 0.0  # the border, which is all that a stride of eight would see
    assert sampled(digits[0], y).input_digest != sampled(digits[1], y).input_digest
    assert sampled(torch.arange(40.0).reshape(4, 10), y).input_digest == 7031326959023229206  # in any process


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 5000),
        torch.randn(2000, 3),
        torch.randn(8, 3, 64, 64).to(memory_format=torch.channels_last),
        torch.randn(300, 40, 30).transpose(0, 2),
        torch.randn(5),
        torch.tensor(3.0),
        torch.randn(6, 1).expand(6, 90_000),
        torch.randint(0, 2, (9, 4), dtype=torch.bool),
        torch.randint(0, 255, (9, 4), dtype=torch.uint8),
        torch.complex(numbers(4, 4), numbers(4, 4, seed=1)).conj(),
    ],
    ids=lambda x: f"{tuple(x.shape)}-{x.dtype}",
)
def test_any_input_can_be_sampled(x):
    found = sampled(x, x) if x.is_floating_point() else sampled(x, torch.ones(9, 1))
    values = torch.view_as_real(x.conj()) if x.is_complex() else x.double()  # as it lies, not resolved
    assert found.num_samples == (x.shape[0] if x.dim() else 1)
    assert found.input_abs_max <= float(values.abs().max()) + 1e-6
    assert found.input_mean == pytest.approx(float(values.mean()), abs=0.2 + 5 * float(values.abs().mean()) / 90)
    assert found.input_is_integer is not (x.is_floating_point() or x.is_complex())


class Result(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


@dataclasses.dataclass
class ModelOutput:
    loss: torch.Tensor | None
    logits: torch.Tensor


OUTPUTS = {
    "tuple": lambda y: (y, None),
    "nested": lambda y: [{"a": 3, "b": (y, y + 1)}],
    "dict": lambda y: {"loss": y.sum(), "logits": y},  # what has dimensions goes first
    "named tuple": lambda y: Result(y.sum(), y),
    "dataclass": lambda y: ModelOutput(None, y),
}


@pytest.mark.parametrize("made", OUTPUTS.values(), ids=OUTPUTS)
def test_tensors_are_found_in_what_models_take_and_return(made):
    y = torch.randn(4, 3)
    ids, mask = torch.randint(0, 9, (4, 6)), torch.zeros(4, 6)
    for args, kwargs in (((ids,), {}), ((), {"input_ids": ids, "attention_mask": mask}), (({"ids": ids},), {})):
        found = sample_of(args, kwargs, made(y), False, True)
        assert found is not None and found.input_is_integer and found.num_samples == 4
        assert found.output_width == 3 and found.output_max == pytest.approx(float(y.max()))


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ("text", torch.ones(2)),
        (torch.ones(2, device="meta"), torch.ones(2, device="meta")),
        (torch.ones(0, 3), torch.ones(0, 3)),
        (torch.ones(2, 2).to_sparse(), torch.ones(2, 2).to_sparse()),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), torch.ones(2)),
    ],
)
def test_where_there_is_nothing_to_read_there_is_no_sample(x, y):
    assert sample_of((x,), {}, y, True, True) is None


@pytest.mark.parametrize("shape", [(5,), (64, 3), (1, 100), (16, 5, 7), (1, 12, 9)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int64, torch.uint8]
)
def test_figures_of_small_tensors_are_those_of_all_elements(dtype, shape):
    torch.manual_seed(sum(shape))
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    x = (
        torch.randint(0, 100, shape)
        if is_whole
        else torch.randn(shape, dtype=torch.cfloat if dtype.is_complex else None)
    )
    x[..., :1] = 3
    for each in (x.to(dtype), x.to(dtype).transpose(0, -1), x.to(dtype).expand(2, *shape), x.to(dtype)[::2].clone()):
        found = figures_of(each)
        real = torch.view_as_real(each) if each.is_complex() else each
        rows = (real[0] if real.dim() > 2 and len(real) == 1 else real).double()
        rows = rows.flatten(1) if rows.dim() > 1 else rows[:, None]
        assert found is not None and found.num_nonfinite == 0
        assert found[1:5] == pytest.approx([float(f) for f in (rows.mean(), rows.std(correction=0), *rows.aminmax())])
        assert found.digest == figures_of(each.contiguous()).digest
        if len(rows) > 1:
            assert found.constant_share == pytest.approx(float((rows == rows[0]).all(0).double().mean()))
            assert found.spread == pytest.approx(float(rows.std(0, correction=0).mean()), rel=1e-9)


@pytest.mark.parametrize("low", [-math.inf, -1e9, torch.finfo(torch.float16).min])
def test_a_mask_that_is_added_is_none_of_the_data(low):
    """As `nn.Transformer.generate_square_subsequent_mask` makes it; a batch of -Inf and other numbers is data."""
    tokens, mask = torch.randint(9, (4, 8)), torch.zeros(8, 8).masked_fill_(torch.ones(8, 8).triu(1).bool(), low)
    found = sample_of((mask, tokens), {}, torch.randn(4, 2), True, True)
    assert found is not None and found.input_is_integer and found.input_num_nonfinite == 0
    if low == -math.inf:
        assert sampled(mask + torch.eye(8), torch.randn(8, 2)).input_num_nonfinite == 28


def train(model, num_steps=60, change=None, shift=0.0, **options):
    """Steps on random numbers; `change` is called with the step between backward and step."""
    torch.manual_seed(0)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=1e-3), model, **options)
    for step in range(num_steps):
        loss = model(torch.randn(64, 8) + shift).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if change is not None:
            change(step)
        optimizer.step()
        optimizer.guard.observe(loss=loss)
    optimizer.guard.flush()
    optimizer.guard.report()
    return optimizer.guard


def normed(momentum=0.1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32, momentum=momentum), nn.ReLU(), nn.Linear(32, 4))


class TestNormStatistics:
    @pytest.mark.parametrize(("momentum", "low", "high"), [(0.1, 0.0, 0.5), (1e-6, 0.5, 9.0)])
    def test_running_means_beside_those_of_a_batch(self, momentum, low, high):
        guard = train(normed(momentum), shift=3.0)
        [(name, (gap, ratio))] = guard.history.model.norm_statistics.items()
        assert name == "1" and low <= gap < high and 0.1 < ratio < 10.0
        fired = by_sign(diagnose(guard.history)).keys()
        assert ("running-statistics-apart" in fired) == (momentum < 0.1)

    @pytest.mark.parametrize("kind", ["float16", "NaN"])
    def test_running_statistics_that_are_not_finite_are_no_health(self, kind):
        model = normed()
        if kind == "float16":
            model[1].half()

        def spoilt(step):
            if kind == "NaN" and step == 30:
                model[1].running_mean[3] = math.nan

        class Cast(nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, x):
                x = self.model[0](x) * 1200.0
                x = self.model[1](x.half()).float() if kind == "float16" else self.model[1](x)
                return self.model[3](self.model[2](x))

        guard = train(Cast(), change=spoilt)
        assert not torch.isfinite(model[1].running_mean + model[1].running_var).all() and guard.history.num_skipped == 0
        assert guard.history.model.norm_statistics == {"model.1": (math.inf, math.inf)}
        report = guard.report()
        assert report.status == "critical" and report.causes[0].rule == "normalisation-statistics"
        again = ModelNotes.of(json.loads(json.dumps(guard.history.model.state(), allow_nan=False)))
        assert again.norm_statistics == guard.history.model.norm_statistics


class TestLoneElement:
    def flipping(self, model, at):
        def change(step):
            if step in at:
                gradient = model[2].weight.grad
                gradient.view(-1)[5] = 1e12

        return change

    @needs_extension
    @pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}], ids=["", "clipped"])
    def test_its_step_is_kept_with_its_tensor(self, options):
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
        guard = train(model, 60, self.flipping(model, {37}), skip_nonfinite=True, **options)
        [one] = guard.history.lone_elements
        assert (one.step, one.name) == (37, "2.weight") and one.value == pytest.approx(1e12)
        assert 0.0 < one.usual < 10.0
