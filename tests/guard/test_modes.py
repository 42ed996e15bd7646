"""Tests of a model that run in training mode, told from other passes without gradients."""

import pytest
import torch
from guard_helpers import needs_extension
from torch import nn

import fastguard
from fastguard.diagnosis import by_sign
from fastguard.observers import modes

pytestmark = needs_extension
SIGN = "validation-in-training-mode"


def make_model(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), *(middle or (nn.Dropout(0.3),)), nn.Linear(16, 4))


def trained(beside, model=None, num_steps=130, each=31, **settings):
    """A run that calls `beside(model, number of the call, inputs)` without autograd after each `each` steps."""
    model = model or make_model()
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, **settings)
    generator = torch.Generator().manual_seed(1)
    for number in range(num_steps):
        x = torch.randn(32, 6, generator=generator)
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.guard.observe(loss=loss)
        if number % each == each - 1:
            with torch.no_grad():
                beside(model, number // each, x)
    return optimizer


def found(optimizer):
    return by_sign(optimizer.guard.report().findings).get(SIGN)


TEST = torch.randn(5, 20, 6, generator=torch.Generator().manual_seed(2))


def called(model, number, x):
    for batch in TEST:
        model(batch)


def test_the_same_batches_in_training_mode_are_a_test_without_eval(tmp_path):
    optimizer = trained(called, sinks=[fastguard.JsonlSink(tmp_path / "run.jsonl")])
    seen = found(optimizer)
    assert (seen.severity, seen.confidence) == ("warning", 0.9)
    assert seen.summary == (
        "The model was called without autograd in training mode, with dropout or batch statistics active, 5 times or "
        "more after steps 31, 62, 93 and 1 more; it was never seen in eval mode."
    )
    optimizer.guard.close()
    read = fastguard.TrainingHistory.from_jsonl(tmp_path / "run.jsonl")
    assert read.model.passes_in_training_mode == ((31, 5, 0, 31), (62, 5, 5, 31), (93, 5, 5, 31), (124, 5, 5, 0))


@pytest.mark.parametrize("middle", [nn.BatchNorm1d(16), nn.Sequential(nn.Dropout(0.1))])
def test_a_short_epoch_is_enough(middle):
    assert found(trained(called, make_model(middle), each=7)).confidence == 0.9


def evaluated(model, number, x):
    model.eval()
    called(model, number, x)
    model.train()


def statistics_first(model, number, x):
    called(model, number, x)  # `update_bn` does this to estimate the statistics again
    evaluated(model, number, x)


def at_last(model, number, x):
    if number == 3:
        evaluated(model, number, x)
    called(model, number, x)


def with_update_bn(model, number, x):
    torch.optim.swa_utils.update_bn(TEST, model)


def with_one_input(model, number, x):
    for _ in range(10):
        model(TEST[0])


def with_one_pass(model, number, x):
    model(TEST[0])


def with_teacher(model, number, x):
    model(x)
    model(x + 0.01)


def with_codes(model, number, x):
    for part in (x + torch.randn(5, 1, 1)).unbind():
        model(part)


def acting(model, number, x):
    for row in TEST[0]:
        model(row[None])


@pytest.mark.parametrize(
    ("beside", "model", "each"),
    [
        (evaluated, make_model(), 31),
        (statistics_first, make_model(nn.BatchNorm1d(16)), 31),
        (at_last, make_model(), 31),
        (with_update_bn, make_model(nn.BatchNorm1d(16)), 31),
        (with_one_input, make_model(), 31),  # Monte Carlo dropout
        (with_teacher, make_model(), 1),
        (with_codes, make_model(), 1),
        (acting, make_model(), 4),
        (called, make_model(nn.Dropout(0.0)), 31),
        (called, make_model(nn.LayerNorm(16)), 31),
        (called, make_model(nn.BatchNorm1d(16, track_running_stats=False)), 31),
        (called, make_model(nn.Dropout(0.3).eval()), 31),
    ],
)
def test_other_passes_without_gradients(beside, model, each):
    assert found(trained(beside, model, each=each)) is None


def test_a_single_batch_again_and_again_is_a_classifiers_test():
    assert found(trained(with_one_pass, make_model(), each=31)).confidence == 0.9
    assert found(trained(with_one_pass, make_model(), each=1)) is None


def test_random_numbers_of_a_generator():
    def sampled(model, number, x):
        for _ in range(5):
            model(torch.randn(32, 6))

    assert found(trained(sampled, make_model(nn.BatchNorm1d(16)), objective="game")) is None


def test_eight_passes_at_eight_places_are_looked_at(monkeypatch):
    looks, data_of = [], modes.data_of
    monkeypatch.setattr(modes, "data_of", lambda *given: looks.append(1) or data_of(*given))

    def long(model, number, x):
        for _ in range(20):
            model(x)

    trained(long, num_steps=100, each=40)
    assert len(looks) == 2 * 8
    trained(long, make_model(nn.Dropout(0.0)), num_steps=100, each=40)
    assert len(looks) == 2 * 8
    optimizer = trained(long, num_steps=400, each=25)
    steps = [step for step, *_ in optimizer.guard.report() and optimizer.guard.history.model.passes_in_training_mode]
    assert steps == [25 * number for number in range(1, 9)]


def test_it_survives_a_resume():
    before = trained(called, num_steps=100)
    assert found(before) is not None
    model = make_model()
    after = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model)
    after.guard.load_state_dict(before.guard.state_dict())
    assert found(after) == found(before)
    for _ in range(60):
        model(TEST[0]).square().mean().backward()
        after.step()
    assert found(after) is not None
    evaluated(model, 0, None)
    assert found(after) is None
