"""How a run begins: weights, parameter groups, one batch learnt by heart."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastguard


class Transformer(nn.Module):
    """Small, with an embedding that may be tied to its head."""

    def __init__(self, num_layers=2, dim=16, *, is_tied=False):
        super().__init__()
        self.embed = nn.Embedding(50, dim, padding_idx=0)
        self.positions = nn.Parameter(torch.zeros(8, dim))
        layer = nn.TransformerEncoderLayer(dim, 2, 32, batch_first=True)
        self.blocks = nn.ModuleList(copy.deepcopy(layer) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 50, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x) + self.positions
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)),
    "conv": lambda: nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.LeakyReLU(), nn.Conv2d(16, 32, 3, groups=4), nn.Sigmoid()),
        *(nn.ConvTranspose2d(32, 8, 2, stride=2), nn.Flatten(), nn.LazyLinear(4)),
    ),
    "transformer": Transformer,
    "tied": lambda: Transformer(is_tied=True),
    "lstm": lambda: nn.Sequential(nn.LSTM(8, 32, num_layers=2, proj_size=8), nn.GRU(8, 32), nn.RNN(32, 32)),
    "bfloat16": lambda: nn.Sequential(nn.GRU(8, 32), nn.Linear(32, 4)).bfloat16(),
}


@pytest.mark.parametrize("name", MODELS)
def test_stable_weights_are_found_healthy(name):
    model = MODELS[name]()
    if name == "conv":
        model(torch.randn(2, 3, 9, 9))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, 30.0)
    assert not fastguard.check_initialization(model).all_ok
    report = fastguard.stable_weight_init(model)
    assert report.all_ok, report
    for weight in report.layers.values():
        assert weight.actual_std == pytest.approx(weight.expected_std, rel=0.25), report
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            assert float(module.weight.detach().std()) == pytest.approx(0.02, rel=0.25) and not module.weight[0].any()
        is_norm = isinstance(module, (nn.LayerNorm, nn.BatchNorm2d))
        for key, p in module._parameters.items():
            if p is not None and p.dim() == 1:
                assert (p == (1.0 if is_norm and key == "weight" else 0.0)).all()


def test_what_cannot_have_stable_weights():
    lazy = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    kept = lazy[0].weight.clone()
    with pytest.raises(ValueError, match=r"`model` must have values in all parameters, got none - at '1\.weight'"):
        fastguard.stable_weight_init(lazy)
    assert torch.equal(lazy[0].weight, kept)
    with pytest.raises(ValueError, match="`model` must have weights that are not frozen"):
        fastguard.stable_weight_init(nn.Linear(2, 2).requires_grad_(False))


def by_name(model, groups):
    known = {id(p): name for name, p in model.named_parameters()}
    pairs = [(known.pop(id(p)), g) for g in groups for p in g["params"]]  # each of them once
    return {name: (g["lr"], g["weight_decay"]) for name, g in pairs}


def test_groups_have_no_decay_on_biases_and_norms():
    model = Transformer(is_tied=True)
    model.blocks[0].requires_grad_(False)
    groups = fastguard.param_groups(model, 1e-3, 0.1)
    assert [set(group) for group in groups] == [{"params", "lr", "weight_decay", "name"}] * 2
    assert [group["name"] for group in groups] == ["all", "all, no decay"]
    found = by_name(model, groups)
    assert not any(name.startswith("blocks.0") for name in found)
    assert found.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    for name, (lr, decay) in found.items():
        assert lr == 1e-3 and decay == (0.0 if "norm" in name or "bias" in name else 0.1), name
    assert [group["name"] for group in fastguard.param_groups(model, 1e-3, 0.0)] == ["all"]
    assert [group["weight_decay"] for group in fastguard.param_groups(nn.LayerNorm((2, 3)), 1.0, 0.1)] == [0.0]


def test_rates_by_depth():
    model = Transformer(num_layers=3)
    found = by_name(model, fastguard.param_groups(model, 1.0, layer_decay=0.5))
    assert found["head.weight"][0] == found["norm.weight"][0] == 1.0
    rates = {name.split(".")[1]: lr for name, (lr, _) in found.items() if name.startswith("blocks")}
    assert rates == {"0": 0.125, "1": 0.25, "2": 0.5}
    assert found["embed.weight"][0] == found["positions"][0] == 0.0625
    deep = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.ReLU(), nn.Linear(2, 2))
    found = by_name(deep, fastguard.param_groups(deep, 1.0, layer_decay=0.5))
    assert found["0.0.weight"][0] == found["0.1.weight"][0] == 0.5 and found["2.weight"][0] == 1.0


def test_rates_by_name():
    model = Transformer()
    rates = {"embed.*": 0.1, "*.self_attn.*": 0.5, "head.*": 10.0, "*.linear1.*": 0.0, "*": 2.0}
    found = by_name(model, fastguard.param_groups(model, 1.0, lr_for=rates))
    assert found["embed.weight"][0] == 0.1 and found["head.weight"][0] == 10.0 and found["norm.weight"][0] == 2.0
    assert found["blocks.1.self_attn.in_proj_weight"][0] == found["blocks.1.self_attn.out_proj.bias"][0] == 0.5
    assert found["blocks.0.linear1.weight"][0] == 0.0 and found["blocks.0.norm1.bias"][0] == 2.0
    both = by_name(model, fastguard.param_groups(model, 1.0, layer_decay=0.5, lr_for={"*norm*": 0.1, "*.bias": 0.2}))
    assert both["blocks.0.norm1.weight"] == (pytest.approx(0.025), 0.0)
    assert both["blocks.0.norm1.bias"][0] == pytest.approx(0.025)
    assert both["blocks.0.linear1.bias"] == (pytest.approx(0.05), 0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "`lr` must be a number > 0, got 0.0"),
        ({"weight_decay": -1.0}, "`weight_decay` must be a finite number >= 0"),
        ({"layer_decay": 1.5}, r"`layer_decay` must be None or in \(0, 1\], got 1.5"),
        ({"lr_for": {"*": math.inf}}, r"`lr_for` must have finite factors >= 0, got inf - at '\*'"),
        ({"lr_for": {"embeding": 0.1, "*": 1.0}}, "must fit parameters that are trained, got embeding, which fit none"),
    ],
)
def test_wrong_groups(settings, message):
    with pytest.raises(ValueError, match=message):
        fastguard.param_groups(Transformer(), **{"lr": 1.0, **settings})
    with pytest.raises(ValueError, match="`model` must have parameters to train"):
        fastguard.param_groups(nn.Linear(1, 1).requires_grad_(False), 1.0)


def make_task(width=32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
    return model, (torch.randn(8, 4), torch.randint(3, (8,)))


def test_one_batch_is_learnt_and_nothing_is_changed():
    model, batch = make_task()
    optimizer = fastguard.wrap(torch.optim.Adam(model.parameters(), lr=1e-2), model)
    kept, numbers = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    result = fastguard.overfit_one_batch(model, optimizer, batch, nn.CrossEntropyLoss(), steps=100)
    assert result and result.learnt and result.end < 0.1 * result.start and not result.advice
    assert str(result).startswith("LEARNT in 100 steps on one batch\n")
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in kept.items()) and not optimizer.state
    assert torch.equal(numbers, torch.get_rng_state()) and optimizer.guard.last is None


def test_a_rate_that_is_too_low_is_told_from_a_model_that_cannot_learn():
    model, batch = make_task()
    low = torch.optim.Adam(model.parameters(), lr=1e-5)
    result = fastguard.overfit_one_batch(model, low, batch, F.cross_entropy, steps=60)
    assert not result and result.advice.startswith("A learning rate of 0.001 does better")
    assert str(result).splitlines()[0] == "NOT LEARNT in 60 steps on one batch" and result.advice in str(result)
    dead = nn.Sequential(nn.Linear(4, 3), nn.Hardtanh(2.0, 3.0))  # no gradient comes through
    optimizer = torch.optim.Adam(dead.parameters(), lr=1e-3)
    result = fastguard.overfit_one_batch(dead, optimizer, batch, F.cross_entropy, steps=20)
    assert not result.learnt and result.advice.startswith("Nothing learns it")


def test_what_cannot_be_learnt_is_an_error():
    model, (x, y) = make_task()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="must be one finite number to train on, and is nan"):
        fastguard.overfit_one_batch(model, optimizer, (x * math.nan, y), F.cross_entropy)
    others = torch.optim.SGD(make_task()[0].parameters(), lr=0.1)  # of another model
    with pytest.raises(ValueError, match="and has no parameter in `optimizer`"):
        fastguard.overfit_one_batch(model, others, (x, y), F.cross_entropy)
    with pytest.raises(ValueError, match="and has 8 elements"):
        fastguard.overfit_one_batch(model, optimizer, (x, y), nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(IndexError):
        fastguard.overfit_one_batch(model, optimizer, (x, y + 5), F.cross_entropy)
    with pytest.raises(ValueError, match="`steps` must be"):
        fastguard.overfit_one_batch(model, optimizer, (x, y), F.cross_entropy, steps=0)
