"""Attention that is scaled_dot_product_attention: what is computed of it, for whom, and what is left behind; and sound
models with attention and experts, on which every rule must be silent."""

import math

import choosing_models
import pytest
import torch
from choosing_models import Block, Heads, Language
from torch import nn
from torch.nn import functional as F

import fastguard
from fastguard import ActivationMonitor
from fastguard.diagnosis import RULES
from fastguard.observers.activations import choices
from fastguard.observers.activations.choices import attention_extracts
from fastguard.observers.tensors import Extract

ORIGINAL = F.scaled_dot_product_attention


def truth(q, k, mask=None, causal=False, scale=None):
    """(mean entropy as a share of the largest, largest logit), in float64, query by query."""
    q, k = q.double(), k.double()
    lead = torch.broadcast_shapes(q.shape[:-2], (*k.shape[:-3], q.shape[-3]) if k.ndim > 2 else ())
    if k.ndim > 2 and k.shape[-3] not in (1, q.shape[-3]):
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    logits = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = logits.broadcast_to((*lead, *logits.shape[-2:])).clone()
    if causal:
        logits += torch.full(logits.shape[-2:], -math.inf).triu(1)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else logits + mask
    entropies = []
    for row in logits.flatten(0, -2):
        row = row[row > -9e3]
        if len(row) > 1:
            p = row.softmax(0)
            entropies.append(float(-(p * p.log()).sum()) / math.log(len(row)))
    return sum(entropies) / len(entropies), float(logits.max())


def attention_extract(q, *rest, **settings):
    """All parts as one."""
    found = attention_extracts(q, *rest, **settings)
    if isinstance(found, str):
        return found
    parts = list(found)
    by_head = [torch.cat(column) for column in zip(*((p.values, p.entropy, p.largest) for p in parts), strict=True)]
    return Extract(by_head[0], None, by_head[1], by_head[2])


def figures(extract):
    finite = extract.entropy[extract.entropy.isfinite()]
    return float(finite.mean()), float(extract.largest.max())


class TestWhatIsComputed:
    generator = torch.Generator().manual_seed(0)

    def draw(self, *shape, scale=1.0):
        return scale * torch.randn(*shape, generator=self.generator)

    @pytest.mark.parametrize(
        ("q", "k"),
        [
            ((2, 4, 9, 8), (2, 4, 9, 8)),
            ((2, 4, 1, 8), (2, 4, 30, 8)),
            ((2, 8, 5, 4), (2, 2, 7, 4)),  # grouped queries
            ((2, 8, 5, 4), (1, 1, 7, 4)),  # one key head, one sequence
            ((4, 6, 8), (4, 6, 8)),
            ((6, 8), (5, 8)),
            ((1, 2, 3, 6, 8), (1, 2, 3, 6, 8)),
        ],
    )
    @pytest.mark.parametrize("scale", [None, 3.0])
    def test_entropy_and_largest_logit(self, q, k, scale):
        q, k = self.draw(*q), self.draw(*k)
        found = figures(attention_extract(q, k, enable_gqa=True, scale=scale))
        expected = truth(q[0, 0] if q.ndim == 5 else q, k[0, 0] if k.ndim == 5 else k, scale=scale)
        if q.ndim == 5:
            expected = truth(q[0], k[0], scale=scale)
            assert found[1] <= expected[1] + 1e-5
        assert found == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("kind", ["causal", "bool", "least", "-inf", "bias", "of each sequence"])
    def test_masks(self, kind):
        q, k = self.draw(2, 3, 8, 4), self.draw(2, 3, 8, 4)
        keep = torch.ones(8, 8, dtype=torch.bool).tril()
        if kind == "causal":
            assert figures(attention_extract(q, k, is_causal=True)) == pytest.approx(truth(q, k, causal=True), rel=1e-5)
            return
        least = torch.finfo(torch.bfloat16).min
        mask = {
            "bool": keep,
            "least": torch.zeros(8, 8).masked_fill(~keep, least),
            "-inf": torch.zeros(8, 8).masked_fill(~keep, -math.inf),
            "bias": self.draw(1, 3, 8, 8),
            "of each sequence": (torch.arange(8) < torch.tensor([5, 8])[:, None])[:, None, None],
        }[kind]
        assert figures(attention_extract(q, k, None, mask)) == pytest.approx(truth(q, k, mask), rel=1e-5)

    def test_of_a_large_call_a_few_queries_and_heads(self):
        q, k = self.draw(5, 40, 100, 4), self.draw(5, 40, 100, 4)
        found = attention_extract(q, k, is_causal=True)
        assert found.values.shape[0] == 2 * 14 and found.values.shape[1] <= 16
        assert attention_extract(q, k).values[..., -1, :].sum(-1).allclose(torch.ones(()))

    def test_what_cannot_be_read_is_said(self):
        q = torch.ones(1, 2, 4, 8)
        assert attention_extract(q.to("meta"), q.to("meta")) == "a tensor without values"
        assert attention_extract(q[:, :, :0], q) == "nothing to attend to"

    def test_bfloat16_is_read_in_float32_and_overflow_is_seen(self):
        q = self.draw(1, 2, 5, 8).bfloat16()
        assert figures(attention_extract(q, q)) == pytest.approx(truth(q, q), rel=1e-5)
        assert attention_extract(torch.full_like(q, math.nan), q).values.isnan().all()


def attended(monitor):
    return {r.name.removesuffix("[attention]"): r for r in monitor.activities if r.family == "attention_weights"}


class TestWhoIsSeen:
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))

    @pytest.mark.parametrize("imported", [False, True], ids=["by torch.nn.functional", "imported by name"])
    def test_own_modules_by_name(self, imported):
        model = nn.Sequential(Heads(imported=imported), nn.Sequential(nn.Identity(), Heads(num_keys=2)))
        monitor = ActivationMonitor(model)
        model(self.x)
        found = attended(monitor)
        assert list(found) == ["0", "1.1"]
        assert 0.0 < found["0"].entropy < 1.0 and found["0"].max_logit is not None and found["0"].load is None

    def test_two_calls_of_one_module_are_told_apart(self):
        class Both(nn.Module):
            def forward(self, x):
                return F.scaled_dot_product_attention(x, x, x) + F.scaled_dot_product_attention(3 * x, x, x)

        model = nn.Sequential(nn.ReLU(), Both())
        monitor = ActivationMonitor(model)
        model(self.x)
        found = attended(monitor)
        assert list(found) == ["1", "1#2"] and found["1#2"].max_logit == pytest.approx(3 * found["1"].max_logit)

    def test_selection_and_switching_off(self):
        model = nn.Sequential(Heads(), Heads())
        for settings, names in (({"modules": "^0"}, ["0"]), ({"attention": False}, [])):
            monitor = ActivationMonitor(model, **settings)
            model(self.x)
            assert list(attended(monitor)) == names
            monitor.detach()

    def test_a_failure_stops_no_forward_pass(self, monkeypatch, caplog):
        model = nn.Sequential(Heads())
        optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, activations=True)
        monkeypatch.setattr(choices, "attention_extracts", lambda *args, **kwargs: 1 / 0)
        model(self.x).sum().backward()
        optimizer.step()
        assert "ZeroDivisionError" in optimizer.guard.activations.skipped["0[attention]"]
        assert "0" in {r.name for r in optimizer.guard.last.activations}

    def test_multihead_attention_and_encoder_layers(self):
        model = nn.ModuleDict({"mha": nn.MultiheadAttention(16, 2), "layer": nn.TransformerEncoderLayer(16, 2, 8)})
        monitor = ActivationMonitor(model, every=1)
        monitor.follow_guard()
        model["mha"](self.x, self.x, self.x, need_weights=False)
        model["mha"](self.x, self.x, self.x)  # returns weights, so torch does not fuse it
        model["layer"](self.x)
        monitor.end_step(0)
        assert list(attended(monitor)) == ["mha", "layer.self_attn"]


class TestWhatIsLeftBehind:
    def run(self, steps, **settings):
        torch.manual_seed(0)
        model = Language(Block(Heads(dropout=0.2), nn.Linear(16, 16)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if settings:
            fastguard.wrap(optimizer, model, **settings)
        functions = []
        for _ in range(steps):
            x = torch.randint(11, (3, 8))
            functions.append(F.scaled_dot_product_attention)
            F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        if settings:
            optimizer.guard.detach()
        return model, functions

    def test_training_is_bit_identical_and_the_function_replaced_at_sampled_steps_alone(self):
        plain, _ = self.run(6)
        watched, functions = self.run(6, activations={"every": 3, "overhead_budget": None})
        assert all(map(torch.equal, plain.parameters(), watched.parameters()))
        assert [f is not ORIGINAL for f in functions] == [True, False, False, True, False, False]
        assert F.scaled_dot_product_attention is choosing_models.scaled_dot_product_attention is ORIGINAL

    @pytest.mark.parametrize("first", [0, 1])
    def test_two_monitors_one_after_the_other(self, first):
        models = [nn.Sequential(Heads()), nn.Sequential(Heads())]
        monitors = [ActivationMonitor(model, every=1) for model in models]
        for model in models:
            model(torch.ones(1, 3, 16))
        assert [len(attended(monitor)) for monitor in monitors] == [1, 1]
        monitors[first].detach()
        assert F.scaled_dot_product_attention is not ORIGINAL
        monitors[1 - first].detach()
        assert F.scaled_dot_product_attention is ORIGINAL


def each_block(model):
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True)
    return model


def whole(model, **settings):
    return torch.compile(model, **{"backend": "aot_eager", "fullgraph": True, **settings})


COMPILED = {
    "whole": (Language, [lambda: Heads(num_keys=2), lambda: Heads(imported=True)], whole),
    "block by block": (Language, [Heads, Heads], each_block),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf", "ignore::DeprecationWarning")
class TestWithinACompiledGraph:
    def train(self, name, *, compiled=True, **settings):
        """Losses, records of attention at the last sampled step, and the number of graphs."""
        kind, attention, compile_ = COMPILED[name]
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = kind(*(Block(make(), nn.Linear(16, 16)) for make in attention))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        if settings:
            fastguard.wrap(optimizer, model, activations={"every": 2, "overhead_budget": None, **settings})
        run = compile_(model) if compiled else model
        losses = []
        for step in range(3):
            tokens = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(step))
            loss = run(tokens).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        records = optimizer.guard.activations.activities if settings else ()
        found = {r.name: (r.entropy, r.max_logit) for r in records if "[attention]" in r.name}
        return losses, found, torch._dynamo.utils.counters["stats"]["unique_graphs"]

    @pytest.mark.parametrize("name", COMPILED)
    def test_each_layer_is_seen_and_training_stays_to_the_bit(self, name):
        plain, _, _ = self.train(name)
        guarded, found, num_graphs = self.train(name, attention=True)
        _, expected, _ = self.train(name, compiled=False, attention=True)
        assert guarded == plain
        assert len(found) == 2 and found.keys() == expected.keys()
        for record, figures in found.items():
            assert figures == pytest.approx(expected[record], rel=1e-4)
        assert name != "whole" or num_graphs == 3  # as with attention=False: it is in that of the sampled steps


ASKED = ("attention-logits-large", "attention-collapse")


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def counting(generator):
    """Each token is the one before plus a step that the sequence keeps."""
    first, step = torch.randint(11, (16, 1), generator=generator), torch.randint(1, 4, (16, 1), generator=generator)
    return (first + step * torch.arange(17)) % 11


def copying(generator):
    """The second half repeats the first: attention to one place is what the task asks."""
    half = torch.randint(11, (16, 9), generator=generator)
    return torch.cat([half, half[:, :8]], 1)


def chain(generator):
    """A Markov chain of eleven states."""
    moves = torch.rand(11, 11, generator=torch.Generator().manual_seed(7)).pow(4)
    x = [torch.randint(11, (16,), generator=generator)]
    for _ in range(16):
        x.append(torch.multinomial(moves[x[-1]], 1, generator=generator)[:, 0])
    return torch.stack(x, 1)


KINDS = {
    "causal, copying": (lambda: Language(*(Block(Heads(), Mlp()) for _ in range(2))), copying),
    "grouped queries, dropout": (lambda: Language(Block(Heads(num_keys=2, dropout=0.1), Mlp())), chain),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sound_models_of_all_kinds_have_no_findings(kind):
    make, draw = KINDS[kind]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    fastguard.wrap(optimizer, model, max_norm=1.0, activations={"every": 10, "overhead_budget": None})
    seen = set()
    for _ in range(120):
        x = draw(generator)
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.guard.observe(loss=loss)
        seen.update(r.family for r in optimizer.guard.activations.activities)
    optimizer.guard.flush()
    history = optimizer.guard.history
    assert "attention_weights" in seen
    assert history.loss_trend.mean < 0.95 * history.loss_trend.first, "it learns nothing"
    found = [finding for name in ASKED if (finding := RULES[name](history)) is not None]
    assert found == []
    optimizer.guard.close()
