"""check_initialization: weights alone, models, and what follows a layer."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import fastguard


def spread(fan_in, fan_out, factor=1.0, seed=0):
    return np.random.default_rng(seed).normal(0, factor * math.sqrt(2 / fan_in), (fan_out, fan_in))


def expected(module, batch=None):
    return {n: e["expected_std"] for n, e in fastguard.check_initialization(module, batch)["layers"].items()}


def test_the_toolkits_way():
    weights = {"a": spread(200, 100), "b": spread(200, 100, 0.01), "c": spread(200, 100, 100.0)}
    result = fastguard.check_initialization(weights)
    assert result["all_ok"] is False
    assert [result[name]["status"] for name in "abc"] == ["ok", "too_small", "too_large"]
    for name, w in weights.items():
        entry = result["layers"][name]
        assert entry["expected_std"] == pytest.approx(math.sqrt(2 / 200))
        assert entry["actual_std"] == pytest.approx(w.std(), rel=1e-6)
        assert entry.ratio == pytest.approx(w.std() / math.sqrt(2 / 200), rel=1e-6) and entry.fan_in == 200
    assert fastguard.check_initialization({"a": weights["a"]}).all_ok is True


@pytest.mark.parametrize(("factor", "status"), [(0.09, "too_small"), (0.11, "ok"), (9.0, "ok"), (11.0, "too_large")])
def test_the_thresholds(factor, status):
    w = torch.from_numpy(spread(400, 300, factor)).float()
    assert fastguard.check_initialization([w])[0].status == status


def test_every_way_to_read_the_result():
    result = fastguard.check_initialization(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert list(result) == ["0.weight", "2.weight", "all_ok"] and isinstance(result, dict)
    entry = result["0.weight"]
    for same in (result["0"], result[0], result["layers"]["0"], result.layers["0.weight"]):
        assert same is entry
    with pytest.raises(KeyError, match=r"nothing is named '1' here; there is: 0\.weight, 2\.weight"):
        result["1"]
    with pytest.raises(AttributeError, match="no 'mean' here; there is: status, expected_std"):
        entry.mean  # noqa: B018
    assert json.loads(json.dumps(result))["0.weight"]["status"] == "ok"
    lines = str(result).splitlines()
    assert lines[0].split()[:2] == ["layer", "status"] and lines[2].startswith("0.weight  ok") and lines[-1] == "all ok"


def test_nan_in_the_weights_is_not_ok():
    w = torch.randn(10, 10)
    w[3, 3] = math.nan
    assert fastguard.check_initialization({"w": w})["w"]["status"] == "not_finite"


ACTIVATIONS = [
    (nn.ReLU(), math.sqrt(2 / 30)),
    (nn.GELU(), math.sqrt(2 / 30)),
    (nn.SiLU(), math.sqrt(2 / 30)),
    (nn.LeakyReLU(0.5), math.sqrt(2 / 30)),
    (nn.SELU(), math.sqrt(1 / 30)),
    (nn.Tanh(), 5 / 3 * math.sqrt(2 / 50)),
    (nn.Sigmoid(), math.sqrt(2 / 50)),
    (nn.Softmax(-1), math.sqrt(1 / 30)),
    (nn.Identity(), math.sqrt(1 / 30)),
]


@pytest.mark.parametrize(("activation", "std"), ACTIVATIONS, ids=lambda v: type(v).__name__)
def test_by_what_follows(activation, std):
    model = nn.Sequential(nn.Linear(30, 20), nn.LayerNorm(20), nn.Dropout(0.1), activation, nn.Linear(20, 2))
    found = expected(model)
    assert found["0.weight"] == pytest.approx(std) and found["4.weight"] == pytest.approx(math.sqrt(1 / 20))


def test_wrapped_models_are_looked_into_and_functions_are_not_seen():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act, self.second, self.last = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.last(torch.tanh(self.second(self.act(self.first(x)))))

    wanted = {"first.weight": math.sqrt(2 / 8), "second.weight": math.sqrt(1 / 8), "last.weight": math.sqrt(1 / 8)}
    for model in (Net(), torch.compile(Net(), backend="eager"), nn.DataParallel(Net())):
        assert expected(model) == pytest.approx(wanted)


def test_fan_in_of_convolutions():
    model = nn.Sequential(
        nn.Conv2d(6, 8, 3, groups=2),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 4, stride=2, groups=2),
        nn.ReLU(),
        nn.Conv1d(4, 4, 5, groups=4),
    )
    fans = [e["fan_in"] for e in fastguard.check_initialization(model)["layers"].values()]
    assert fans == [3 * 9, 4 * 16 // 4, 5]


def test_recurrent_attention_and_bilinear_layers():
    lstm = expected(nn.LSTM(12, 20, num_layers=2, proj_size=5))
    assert lstm["weight_ih_l0"] == pytest.approx(math.sqrt(2 / (12 + 20)))
    assert lstm["weight_hh_l1"] == pytest.approx(math.sqrt(2 / (5 + 20)))
    assert lstm["weight_hr_l0"] == pytest.approx(math.sqrt(1 / 20))
    assert expected(nn.RNN(12, 20, nonlinearity="relu"))["weight_hh_l0"] == pytest.approx(math.sqrt(2 / 20))
    assert expected(nn.GRUCell(12, 20))["weight_ih"] == pytest.approx(math.sqrt(2 / 32))
    assert expected(nn.MultiheadAttention(16, 4))["in_proj_weight"] == pytest.approx(math.sqrt(1 / 16))
    apart = expected(nn.MultiheadAttention(16, 4, kdim=8, vdim=4))
    assert apart["k_proj_weight"] == pytest.approx(math.sqrt(2 / 24)) and "in_proj_weight" not in apart
    assert expected(nn.Bilinear(3, 4, 5))["weight"] == pytest.approx(math.sqrt(1 / 12))
    layers = expected(nn.TransformerEncoderLayer(16, 4, 32, activation="gelu"))
    assert layers["linear1.weight"] == pytest.approx(math.sqrt(2 / 16)) == layers["linear2.weight"] * 2


DEFAULTS = {
    "mlp": lambda: nn.Sequential(nn.Linear(100, 50), nn.Tanh(), nn.Linear(50, 10)),
    "cnn": lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 8, 4, 2)),
    "transformer": lambda: nn.Transformer(32, 4, 2, 2, 64, batch_first=True),
    "gru": lambda: nn.GRU(30, 40, 2, bidirectional=True),
    "embedding": lambda: nn.Sequential(nn.Embedding(500, 768, padding_idx=0), nn.Linear(768, 10)),
}


@pytest.mark.parametrize("make", DEFAULTS.values(), ids=DEFAULTS.keys())
def test_torchs_own_defaults_are_ok(make):
    result = fastguard.check_initialization(make())
    assert result["all_ok"], result


def test_embeddings_are_not_judged_also_where_they_are_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(100, 400), nn.Linear(400, 100, bias=False)
            self.head.weight = self.table.weight

    for model, name in ((nn.Embedding(100, 400), "weight"), (Tied(), "table.weight")):
        result = fastguard.check_initialization(model)
        assert result.all_ok and not result.layers and result["not_judged"] == {name: "an embedding"}


@pytest.mark.parametrize("normalises", [True, False])
def test_a_narrow_gpt2_is_ok_where_it_normalises(normalises):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)), nn.LayerNorm(64) if normalises else nn.Identity())
    for i in range(8):
        nn.init.normal_(model[i].weight, std=0.02 if i % 2 else 0.02 / math.sqrt(8))
    result = fastguard.check_initialization(model)
    assert {result[f"{i}.weight"].status for i in range(8)} == ({"ok"} if normalises else {"ok", "too_small"})
    assert ("GPT-2" in result["0.weight"].rule) == normalises


def test_parametrized_weights_are_judged_as_they_are_used():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(50, 40)), nn.ReLU())
    result = fastguard.check_initialization(model)
    assert result["0"].status == "ok" and result["0"].actual_std == pytest.approx(
        float(model[0].weight.detach().std()), rel=1e-2
    )
    with torch.no_grad():
        model[0].parametrizations.weight.original0.mul_(1000)
    assert fastguard.check_initialization(model)["0"].status == "too_large"


def test_lazy_and_meta_parameters_are_said_and_not_called_ok():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LazyLinear(3), nn.Linear(3, 3, device="meta"))
    result = fastguard.check_initialization(model)
    assert result["0"].status == "ok" and not result["all_ok"]
    assert result["not_judged"]["2.weight"].startswith("lazy") and "meta" in result["not_judged"]["3.weight"]
    assert "2.weight: not judged, lazy" in str(result)
    with pytest.raises(ValueError, match=r"at least one weight that can be judged, got none \(weight: lazy"):
        fastguard.check_initialization(nn.LazyLinear(3))


def test_variances_from_layer_to_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 200), nn.ReLU(inplace=True), nn.Linear(200, 200), nn.BatchNorm1d(200))
    for i in (0, 2):
        nn.init.kaiming_normal_(model[i].weight)
        nn.init.zeros_(model[i].bias)
    x = torch.randn(100, 200)
    state, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    result = fastguard.check_initialization(model, x)
    assert result["0"].variance_ratio is None and result["0"].output_variance == pytest.approx(2.0, rel=0.1)
    assert result["2"].variance_ratio == pytest.approx(1.0, rel=0.2) and result["variance_ok"] is True
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert not model[0]._forward_hooks
    nn.init.normal_(model[2].weight, std=0.5)  # 7 times too much: still ok as a weight, not as a ratio
    result = fastguard.check_initialization(model, (x,))
    assert result["2"].status == "ok" and result["2"].variance_ratio > 10 and result["variance_ok"] is False
    assert result["all_ok"] and "variance ratio" in str(result)
    assert fastguard.check_initialization(model)["variance_ok"] is None


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (3, TypeError, "`model_or_weights` must be a module, or a dict or list of weights, got int"),
        (["w"], TypeError, "must hold tensors or arrays, got str - at 'layer0'"),
        ({}, ValueError, r"at least one weight that can be judged, got none \(it has no weight matrices\)"),
        (nn.ReLU(), ValueError, "at least one weight that can be judged"),
    ],
)
def test_refusals(given, error, message):
    with pytest.raises(error, match=message):
        fastguard.check_initialization(given)


def test_a_batch_needs_a_model():
    with pytest.raises(TypeError, match="`batch` must be left out where there is no model"):
        fastguard.check_initialization([torch.ones(2, 2)], torch.ones(2))
