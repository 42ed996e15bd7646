"""Inputs of validation that are prepared otherwise than those of training, told from those that only look it."""

import pytest
import torch
from guard_helpers import needs_extension
from torch import nn

import fastguard
from fastguard.diagnosis import by_sign
from fastguard.observers import likeness
from fastguard.observers.tensors import index_of

pytestmark = needs_extension
datasets = pytest.importorskip("sklearn.datasets", reason="the digits come with scikit-learn: pip install -e '.[dev]'")
PLACES = torch.randperm(64, generator=torch.Generator().manual_seed(3))


def as_they_are(x):
    return x


def inverted(x):
    return 1.0 - x


def permuted(x):
    return x.flatten(1)[:, PLACES].view_as(x)


def turned(x):
    return torch.rot90(x, 1, (2, 3))


def normalised(x):
    return (x - 0.305) / 0.376


def noisy(x):
    return x + 0.5 * torch.randn_like(x)


def very_noisy(x):
    return x + torch.randn_like(x)


def flipped(x):
    return torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x)


def shifted(x):
    return torch.stack([torch.roll(one, torch.randint(-2, 3, (2,)).tolist(), (1, 2)) for one in x])


def cut_out(x):
    return x * (torch.rand(len(x), 1, 8, 8) > 0.4)


def channels_last(x):
    return x.to(memory_format=torch.channels_last)


def digits():
    x, y = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return torch.tensor(x / 16.0).float().view(-1, 1, 8, 8)[order], torch.tensor(y)[order]


def trained(train=as_they_are, test=as_they_are, pick=slice(1000, None), known=slice(0, 1000), size=50, sinks=()):
    torch.manual_seed(0)
    x, y = digits()
    inputs, targets = x[known], y[known]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = fastguard.wrap(torch.optim.Adam(model.parameters(), 1e-3), model, sinks=sinks)
    for _ in range(8):
        model.train()
        for rows in torch.randperm(len(inputs)).split(64):
            loss = nn.functional.cross_entropy(model(train(inputs[rows])), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            optimizer.guard.observe(loss=loss)
        model.eval()
        with torch.no_grad():
            for batch in x[pick].split(size):
                model(test(batch))
    return optimizer


def found(optimizer):
    return by_sign(optimizer.guard.report().findings).get("validation-inputs-differ")


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (as_they_are, inverted),
        (as_they_are, permuted),
        (permuted, as_they_are),
        (as_they_are, turned),
        (flipped, inverted),
        (cut_out, permuted),
        (channels_last, inverted),
    ],
)
def test_inputs_that_are_at_other_places(train, test):
    seen = found(trained(train, test))
    assert seen.severity == "warning" and "less like the mean training input" in seen.summary


@pytest.mark.parametrize(("train", "test"), [(normalised, as_they_are), (as_they_are, normalised)])
def test_the_same_inputs_on_another_scale(train, test):
    seen = found(trained(train, test))
    assert seen.severity == "warning" and seen.evidence["ratio"] > 2.5


@pytest.mark.parametrize("train", [as_they_are, noisy, flipped, shifted, cut_out, channels_last])
def test_augmented_inputs_are_as_like(train):
    assert found(trained(train)) is None


def test_noise_in_training_is_no_more_than_a_remark():
    assert found(trained(very_noisy)).severity == "info"


@pytest.mark.parametrize("size", [16, 1000])
def test_other_classes_are_as_like(size):
    classes = digits()[1]
    assert found(trained(pick=1000 + classes[1000:].argsort(), size=size)) is None
    for one in range(10):
        (its,) = (classes[1000:] == one).nonzero(as_tuple=True)
        (others,) = (classes != one).nonzero(as_tuple=True)
        assert found(trained(pick=1000 + its, size=size)) is None
        assert found(trained(pick=1000 + its, known=others[:800], size=size)) is None


def test_one_class_alone_is_no_standard():
    classes = digits()[1]
    for one in (0, 4, 6):
        (its,) = (classes == one).nonzero(as_tuple=True)
        assert found(trained(pick=slice(1000, None), known=its.repeat(4))) is None


def test_it_is_in_the_log_and_survives_a_resume(tmp_path):
    optimizer = trained(test=inverted, sinks=[fastguard.JsonlSink(tmp_path / "run.jsonl")])
    seen, state = found(optimizer), optimizer.guard.state_dict()
    optimizer.guard.close()
    read = fastguard.TrainingHistory.from_jsonl(tmp_path / "run.jsonl")
    assert read.model.input_likeness == optimizer.guard.history.model.input_likeness
    model = nn.Linear(64, 10)
    after = fastguard.wrap(torch.optim.Adam(model.parameters()), model)
    after.guard.load_state_dict(state)
    assert found(after) == seen


def test_inputs_of_several_shapes_are_not_compared():
    model = nn.Sequential(nn.AdaptiveAvgPool1d(20), nn.Linear(20, 4))
    optimizer = fastguard.wrap(torch.optim.Adam(model.parameters()), model)
    ramp = torch.linspace(-1.0, 1.0, 20)
    for step in range(200):
        model(ramp.repeat(32, 1) + 0.1 * torch.randn(32, 20)).square().mean().backward()
        optimizer.step()
        if step % 20 == 19:
            model.eval()
            for _ in range(5):
                with torch.no_grad():
                    model(-torch.linspace(-1.0, 1.0, 20 + (step == 99)).repeat(32, 1) + 0.1 * torch.randn(32, 1))
            model.train()
        if step == 90:
            assert found(optimizer).severity == "warning"
    assert found(optimizer) is None


def test_large_and_strided_inputs_are_read_at_the_same_places():
    x = torch.randn(70, 3, 32, 30)
    few, as_few = (
        likeness._spread(x.to(memory_format=way), 2880) for way in (torch.channels_last, torch.contiguous_format)
    )
    assert few.shape == (14, 222) and torch.equal(few, as_few)
    assert likeness._spread(x[:5, 0, 0], 30).shape == (5, 30)


@pytest.mark.parametrize("shape", [(7,), (3, 5), (4, 1, 6, 2)])
def test_an_index_is_that_of_unravel_index(shape):
    places = torch.arange(0, torch.Size(shape).numel(), 3)
    assert all(map(torch.equal, index_of(places, shape), torch.unravel_index(places, shape)))
