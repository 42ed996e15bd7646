"""Each arm changes one thing, exactly, and nothing else."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fastguard
from fastguard.diagnosis import CAUSES
from fastguard.experiments import ARMS, Context, arms, arms_for
from fastguard.observers.loss_gradient import facts_of_loss


def context(model=None, optimizer=None, **more):
    model = nn.Linear(3, 2) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    return Context([optimizer], model, **more)


def step(made, x=None, n=1):
    """`n` steps on the sum of the outputs."""
    for _ in range(n):
        made.model(torch.ones(4, 3) if x is None else x).sum().backward()
        made.optimizers[0].step()


def test_the_table_names_causes_that_exist():
    for name, arm in ARMS.items():
        assert arm.name == name and arm.text and arm.advice.endswith(".") and set(arm.remedies) <= set(CAUSES)
    assert [arm.name for arm in ARMS.values() if arm.is_null] == ["inputs permuted"]
    assert [arm.name for arm in arms_for(["wrong-targets", "clipped-away"])] == ["inputs permuted", "max_norm x10"]


@pytest.mark.parametrize("factor", [10.0, 0.1, 100.0, 0.01])
def test_the_learning_rate_is_multiplied_under_a_scheduler_that_does_not_see_it(factor):
    made, name = context(), f"lr x{factor:g}"
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made.optimizers[0], 0.5)
    ARMS[name].apply(made)
    for expected in (0.1, 0.05, 0.025):
        before = made.model.bias.detach().clone()
        made.optimizers[0].zero_grad()
        step(made)
        assert made.optimizers[0].param_groups[0]["lr"] == pytest.approx(expected)
        assert (before - made.model.bias.detach()).tolist() == pytest.approx([4.0 * expected * factor] * 2, rel=1e-4)
        scheduler.step()


def test_a_warm_up_ends_after_half_the_steps():
    made, seen = context(num_steps=4), []
    ARMS["warm-up"].apply(made)
    made.optimizers[0].register_step_pre_hook(lambda o, a, k: seen.append(o.param_groups[0]["lr"]))
    step(made, n=3)
    assert seen == pytest.approx([0.05, 0.1, 0.1])


def test_clipping_goes_through_the_guard():
    made = context()
    guard = fastguard.wrap(made.optimizers[0], made.model, max_norm=0.5).guard
    made.guard = guard
    assert "clipped already" in ARMS["clipping"].why_not(made) and ARMS["max_norm x10"].why_not(made) is None
    ARMS["max_norm x10"].apply(made)
    assert guard.clip.max_norm == 5.0
    guard.clip = None
    assert "fixed norm" in ARMS["max_norm x10"].why_not(made) and "known" in ARMS["clipping"].why_not(made)
    step(made, n=3)
    guard.flush()
    ARMS["clipping"].apply(made)
    assert guard.clip.max_norm == sorted(entry.norm for entry in guard.history.recent)[1]


def test_settings_of_the_optimizer():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.1, 0.2), eps=1.0, weight_decay=0.3)
    made = context(model, optimizer)
    ARMS["no weight decay"].apply(made)
    ARMS["default settings"].apply(made)
    group = optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"], group["eps"], group["lr"]) == (0.0, (0.9, 0.999), 1e-8, 0.1)
    assert "default" in ARMS["default settings"].why_not(made) and "no" in ARMS["no weight decay"].why_not(made)


def test_gradients_are_cleared_after_each_step():
    made = context()
    ARMS["gradients cleared"].apply(made)
    step(made)
    assert all(p.grad is None for p in made.model.parameters())


def test_train_mode_and_dropout():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.LSTM(3, 3, 2, dropout=0.3))
    made = context(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "training mode" in ARMS["train mode"].why_not(made) and ARMS["no dropout"].why_not(made) is None
    model.eval()
    assert ARMS["train mode"].why_not(made) is None
    ARMS["train mode"].apply(made)
    with torch.no_grad():
        model(torch.ones(2, 3))
    assert not model.training
    model(torch.ones(2, 3))
    assert model.training and model[1].training
    ARMS["no dropout"].apply(made)
    assert model[1].p == model[2].dropout == 0.0 and "drops" in ARMS["no dropout"].why_not(made)


def test_autocast_is_off_within_the_model_and_on_around_it():
    class Asks(nn.Linear):
        def forward(self, x):
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(x)

    seen, model = [], Asks(3, 2)
    made = context(model)
    ARMS["float32"].apply(made)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.ones(2, 3)).dtype is torch.float32 and torch.is_autocast_enabled("cpu")
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 9))
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False, False]


@pytest.mark.parametrize(
    ("made_by", "loss", "sound"),
    [
        (lambda x: x.softmax(-1), F.cross_entropy, F.cross_entropy),
        (lambda x: x.sigmoid(), F.cross_entropy, F.cross_entropy),
        (lambda x: 1.0 * x, F.nll_loss, F.cross_entropy),
        (lambda x: x.softmax(-1), F.nll_loss, F.cross_entropy),
        (
            lambda x: x[:, 0].sigmoid(),
            lambda p, y: F.binary_cross_entropy_with_logits(p, y.float()),
            lambda x, y: F.binary_cross_entropy_with_logits(x[:, 0], y.float()),
        ),
    ],
)
def test_an_activation_before_the_loss_is_undone(made_by, loss, sound):
    arm, x, y = ARMS["no final activation"], torch.randn(6, 2, requires_grad=True), torch.tensor([0, 1, 1, 0, 1, 0])
    known, before, expected = fastguard.TrainingHistory(), loss(made_by(x), y), sound(x, y)
    known.note_model(**facts_of_loss(before, None))
    made = context(known=known)
    assert arm.why_not(made) is None and "what it is given" in arm.why_not(context())
    arm.apply(made)
    try:
        assert torch.allclose(loss(made_by(x), y), expected, atol=1e-5)
        with torch.no_grad():
            assert torch.allclose(loss(made_by(x), y), expected, atol=1e-5)
    finally:
        for undo in made.undo:
            undo()
    assert torch.equal(loss(made_by(x), y), before)


def test_the_last_activation_is_passed_over_if_the_loss_is_an_error_between_numbers():
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    known = fastguard.TrainingHistory()
    known.note_model(loss_kind="squared error", last_modules=["Tanh", "Linear"])
    made = context(model, known=known)
    assert ARMS["no final activation"].why_not(made) is None
    ARMS["no final activation"].apply(made)
    for undo in made.undo:
        undo()
    assert torch.equal(model(torch.ones(4, 3)), model[0](torch.ones(4, 3)))


def test_default_initialization_leaves_the_generator_alone():
    made = context()
    nn.init.constant_(made.model.weight, 7.0)
    before = torch.get_rng_state()
    ARMS["default initialization"].apply(made)
    assert torch.equal(before, torch.get_rng_state()) and made.model.weight.abs().max() < 1.0
    made.step = 1
    for name in ("default initialization", "inputs standardized", "warm-up", "batches shuffled"):
        assert "before the first step" in ARMS[name].why_not(made)


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, *args, **kwargs):
        self.seen = args, kwargs
        return self.layer(torch.ones(1, 1))


def test_inputs_are_permuted_and_targets_are_not():
    made = context(Takes())
    before = torch.get_rng_state()
    ARMS["inputs permuted"].apply(made)
    x, y = torch.arange(6.0)[:, None], torch.arange(6)
    for _ in range(20):
        made.model({"a": x, "b": [x]}, y)
        (inputs, targets), _ = made.model.seen
        assert torch.equal(inputs["a"], inputs["b"][0]) and torch.equal(targets, y)
        assert sorted(inputs["a"].flatten().tolist()) == y.tolist() and not (inputs["a"] == x).any()
    made.model(input_ids=x, labels=y, decoder_input_ids=y)
    _, kwargs = made.model.seen
    assert not torch.equal(kwargs["input_ids"], x) and kwargs["labels"] is y and kwargs["decoder_input_ids"] is y
    assert torch.equal(before, torch.get_rng_state())
    with torch.no_grad():
        made.model(x)
    assert made.model.seen[0][0] is x
    alone = x[:1]
    made.model(alone)  # there is no other sample
    assert made.model.seen[0][0] is alone


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy])
def test_targets_are_shifted_against_outputs_in_the_loss_function(loss):
    x, y = torch.linspace(0.1, 0.9, 6).requires_grad_(), torch.linspace(0.1, 0.9, 6)
    known, expected = fastguard.TrainingHistory(), loss(x, y)
    known.note_model(**facts_of_loss(expected, None))
    made = Context([], known=known)
    assert ARMS["inputs permuted"].why_not(made) is None
    ARMS["inputs permuted"].apply(made)
    try:
        assert all(not torch.equal(loss(x, y), expected) for _ in range(20))
        with torch.no_grad():
            assert torch.equal(loss(x, y), expected)
    finally:
        for undo in reversed(made.undo):
            undo()
    assert torch.equal(loss(x, y), expected)


def test_inputs_are_standardised_by_feature():
    made = context(Takes())
    ARMS["inputs standardized"].apply(made)
    x = torch.randn(64, 3, 5, 5) * torch.tensor([1e-3, 1.0, 500.0])[:, None, None] + 40.0
    x[:, 1] = 7.0
    made.model(x)
    (seen,), _ = made.model.seen
    assert seen.mean((0, 2, 3)).abs().max() < 1e-2 and seen[:, 1].abs().max() == 0.0
    assert seen[:, 2].std() == pytest.approx(1.0, rel=1e-3)
    made.model(torch.arange(4))
    assert made.model.seen[0][0].dtype is torch.int64


def test_targets_are_standardized_in_the_units_of_the_loss():
    known = fastguard.TrainingHistory()
    known.note_model(target_mean=100.0, target_std=20.0)
    arm, made, plain = ARMS["targets standardized"], context(known=known), nn.Linear(3, 2)
    assert arm.why_not(made) is None and "not known" in arm.why_not(context())
    plain.load_state_dict(made.model.state_dict())
    arm.apply(made)
    x, y = torch.randn(8, 3), 100.0 + 20.0 * torch.randn(8, 2)
    loss, standardized = (made.model(x) - y).square().mean(), (plain(x) - (y - 100.0) / 20.0).square().mean()
    assert loss.item() == pytest.approx(400.0 * standardized.item(), rel=1e-4)
    loss.backward()
    standardized.backward()
    assert torch.allclose(made.model.weight.grad, plain.weight.grad, rtol=1e-3)
    known.note_model(target_mean=0.1, target_std=1.0)
    assert "standardized" in arm.why_not(made)


def test_what_the_script_clips_is_counted_and_its_limit_raised(monkeypatch):
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        monkeypatch.setattr(module, "clip_grad_norm_", torch.nn.utils.clip_grad_norm_)
    monkeypatch.setattr(arms, "SCRIPT_CLIP", arms.ScriptClip())
    made, arm = context(), ARMS["max_norm x10"]
    assert "nothing clips" in arm.why_not(made)
    arms.SCRIPT_CLIP.install()
    made.model.weight.grad = torch.full((2, 3), 100.0)
    torch.nn.utils.clip_grad_norm_(made.model.parameters(), 1.0)
    assert made.model.weight.grad.norm() == pytest.approx(1.0, rel=1e-3) and arm.why_not(made) is None
    arm.apply(made)
    made.model.weight.grad = torch.full((2, 3), 100.0)
    torch.nn.utils.clip_grad_norm_(made.model.parameters(), 1.0)
    assert made.model.weight.grad.norm() == pytest.approx(10.0, rel=1e-3)


def test_loaders_that_read_in_order_are_shuffled(monkeypatch):
    monkeypatch.setattr(DataLoader, "__init__", DataLoader.__init__)
    gc.collect()
    loader = DataLoader(TensorDataset(torch.arange(50)), batch_size=50)
    assert ARMS["batches shuffled"].why_not(context()) is None
    assert next(iter(loader))[0].tolist() == list(range(50))
    ARMS["batches shuffled"].prepare()
    before = torch.get_rng_state()
    shuffled = DataLoader(TensorDataset(torch.arange(50)), batch_size=50)
    assert next(iter(shuffled.batch_sampler)) != list(range(50)) and torch.equal(before, torch.get_rng_state())
    first, second = (next(iter(shuffled))[0].tolist() for _ in range(2))
    assert sorted(first) == list(range(50)) and first != second
    assert "shuffles already" in ARMS["batches shuffled"].why_not(context())


def test_what_needs_a_model_says_so():
    p = nn.Parameter(torch.ones(1))
    made = Context([torch.optim.SGD([p], lr=0.1)])
    for name in ("float32", "train mode", "no dropout", "inputs permuted"):
        assert ARMS[name].why_not(made) == "the model is not known"
