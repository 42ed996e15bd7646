"""Targets that are tokens of other places in a sequence, and outputs that see them: what is found, and what is not."""

import pytest
import torch
from guard_helpers import needs_extension
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fastguard
from fastguard.observers.graph import gradient_at

pytestmark = needs_extension
NUM_TOKENS, WIDTH, LENGTH = 30, 16, 16


def mask(length):
    return nn.Transformer.generate_square_subsequent_mask(length)


class Transformer(nn.Module):
    """A small one. `way` says what is odd about it."""

    def __init__(self, way="", is_causal=True):
        super().__init__()
        self.tokens, self.places = nn.Embedding(NUM_TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True) for _ in range(2)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, NUM_TOKENS)
        self.norm = nn.BatchNorm1d(WIDTH) if way == "batch norm" else nn.Identity()
        self.way, self.is_causal, self.num_calls = way, is_causal, 0

    def forward(self, x, targets=None):
        x = x[:, :-1] if self.way == "drops the last" else x
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        if self.way == "start token":
            h = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)
        seen = mask(x.shape[1]) if self.is_causal else None
        if self.way == "prefix":
            seen[:6, :6] = 0.0
        for layer in self.layers:
            h = (
                checkpoint(self.call, layer, h, seen, use_reentrant=False)
                if "checkpoint" in self.way
                else layer(h, seen)
            )
        y = self.head(Same.apply(h) if self.way == "function" else self.norm(h.mT).mT)
        if self.way == "classes second":
            y = y.mT
        if targets is not None:
            return y, F.cross_entropy(y.flatten(0, 1), targets.flatten())
        return y.flatten(0, 1) if self.way == "flat" else y

    def call(self, layer, *args):
        self.num_calls += 1
        return layer(*args)


class Same(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient


class Recurrent(nn.Module):
    """Of sequences [time, samples]."""

    def __init__(self, kind, both_ways=False):
        super().__init__()
        self.tokens, self.body = nn.Embedding(NUM_TOKENS, WIDTH), kind(WIDTH, WIDTH, bidirectional=both_ways)
        self.head = nn.Linear(WIDTH * (1 + both_ways), NUM_TOKENS)

    def forward(self, x):
        return self.head(self.body(self.tokens(x))[0])


class Convolution(nn.Module):
    def __init__(self, left, right):
        super().__init__()
        self.tokens, self.body = nn.Embedding(NUM_TOKENS, WIDTH), nn.Conv1d(WIDTH, NUM_TOKENS, 3)
        self.padding = left, right

    def forward(self, x):
        return self.body(F.pad(self.tokens(x).mT, self.padding))


class Translator(nn.Module):
    def __init__(self, is_causal=True):
        super().__init__()
        self.source, self.target = nn.Embedding(NUM_TOKENS, WIDTH), nn.Embedding(NUM_TOKENS, WIDTH)
        self.body = nn.Transformer(WIDTH, 2, 1, 1, 32, batch_first=True)
        self.head, self.is_causal = nn.Linear(WIDTH, NUM_TOKENS), is_causal

    def forward(self, x, y):
        seen = mask(y.shape[1]) if self.is_causal else None
        return self.head(self.body(self.source(x), self.target(y), tgt_mask=seen))


class Variational(nn.Module):
    """An autoencoder whose decoder is given the tokens, too."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(NUM_TOKENS, WIDTH), nn.Linear(WIDTH, NUM_TOKENS)
        self.encoder, self.decoder = (nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(2))

    def forward(self, x):
        embedded = self.tokens(x)
        code = self.encoder(embedded)[1][0]
        return self.head(self.decoder(embedded + code[:, None])[0]), code


def text(step, extra=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(NUM_TOKENS, (12, LENGTH + extra), generator=generator)


def ahead(shift, by_time=False, extra=0):
    """Tokens, and those so many places on."""

    def batch(step):
        x = text(step, 4)
        x, y = x[:, 1 : 1 + LENGTH + extra], x[:, 1 + shift : 1 + LENGTH + shift]
        return ((x.T.contiguous(),), y.T) if by_time else ((x,), y)

    return batch


def with_targets(step):
    (x,), y = ahead(1)(step)
    return (x, y), y


def translation(step, source=None):
    y = text(step, 1)
    return ({"": text(step + 99), "all": y[:, 1:], "given": y[:, :-1]}[source or ""], y[:, :-1]), y[:, 1:]


def masked(step):
    x, y = text(step), text(step)
    places = torch.rand(y.shape, generator=torch.Generator().manual_seed(step)) < 0.3
    return (x.masked_fill(places, 0),), y if step % 2 else y.masked_fill(~places, -100)


def suffix(step):
    (x,), y = ahead(1)(step)
    y = y.clone()
    y[:, :6] = -100
    return (x,), y


def tags(step):
    return (text(step),), text(step) % 7


def runs(step):
    x = text(step, 4).repeat_interleave(8, 1)
    return (x[:, :LENGTH],), x[:, 1 : LENGTH + 1]


def repeated(step):
    x = torch.full((12, LENGTH), step % 3 + 1)
    return (x,), x


def loss_of(output, targets):
    if isinstance(output, tuple):
        output, more = output
        return loss_of(output, targets) + 0.01 * more.square().mean() if more.dim() else more
    if output.dim() == 3 and output.shape[1] == NUM_TOKENS:
        return F.cross_entropy(output, targets)
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def train(model, batch, num_steps=12, guard=True):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fastguard.wrap(optimizer, model) if guard else optimizer
    for step in range(num_steps):
        given, targets = batch(step)
        loss = loss_of(model(*given), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if guard:
            optimizer.guard.observe(loss=loss)
    return optimizer.guard if guard else None


def signs(guard):
    return {f.evidence.get("sign", f.rule) for f in guard.report().findings if f.severity != "info"}


LEAKS = {
    "no mask": (Transformer, {"is_causal": False}, ahead(1)),
    "no mask, rows flat": (Transformer, {"is_causal": False, "way": "flat"}, ahead(1)),
    "no mask, classes second": (Transformer, {"is_causal": False, "way": "classes second"}, ahead(1)),
    "no mask, loss in the model": (Transformer, {"is_causal": False}, with_targets),
    "no mask, one token more": (Transformer, {"is_causal": False, "way": "drops the last"}, ahead(1, extra=1)),
    "two ahead": (Transformer, {"is_causal": False}, ahead(2)),
    "LSTM": (Recurrent, {"kind": nn.LSTM, "both_ways": True}, ahead(1, by_time=True)),
    "GRU": (Recurrent, {"kind": nn.GRU, "both_ways": True}, ahead(1, by_time=True)),
    "convolution": (Convolution, {"left": 1, "right": 1}, ahead(1)),
    "decoder": (Translator, {"is_causal": False}, translation),
}


@pytest.mark.parametrize("name", LEAKS)
def test_an_output_that_sees_its_target(name, caplog):
    kind, options, batch = LEAKS[name]
    guard = train(kind(**options), batch)
    assert [record.sign for record in caplog.records] == ["answer-seen"]  # by step 12
    shift, place, sees = guard.history.model.target_shift
    assert shift == (2 if name == "two ahead" else 1) and sees >= place + shift
    assert signs(guard) == {"answer-seen"}
    assert [cause.rule for cause in guard.report().causes] == ["trivial-targets"]


SOUND = {
    "transformer": (Transformer, {}, ahead(1), 1),
    "rows flat": (Transformer, {"way": "flat"}, ahead(1), 1),
    "loss in the model": (Transformer, {}, with_targets, 1),
    "LSTM": (Recurrent, {"kind": nn.LSTM}, ahead(1, by_time=True), 1),
    "GRU": (Recurrent, {"kind": nn.GRU}, ahead(1, by_time=True), 1),
    "convolution": (Convolution, {"left": 2, "right": 0}, ahead(1), 1),
    "prefix that is seen whole": (Transformer, {"way": "prefix"}, suffix, 1),
    "start token within the model": (Transformer, {"way": "start token"}, ahead(0), None),
    "translation": (Translator, {}, translation, 1),
    "copying": (Translator, {}, lambda step: translation(step, "all"), 1),
    "autoencoder": (Translator, {}, lambda step: translation(step, "given"), 1),
    "variational autoencoder": (Variational, {}, ahead(1), 1),
    "masked tokens": (Transformer, {"is_causal": False}, masked, None),
    "tags": (Transformer, {"is_causal": False}, tags, None),
    "runs of a token": (Transformer, {"is_causal": False}, runs, None),
    "one token": (Transformer, {"is_causal": False}, repeated, None),
}


@pytest.mark.parametrize("name", SOUND)
def test_silent_on_sound_training(name):
    kind, options, batch, shift = SOUND[name]
    guard = train(kind(**options), batch)
    found = guard.history.model.target_shift
    assert found[:1] == (() if shift is None else (shift,)) and signs(guard) <= {"sorted-targets", "one-target"}
    assert len(found) < 3 or found[1] == found[2]


@pytest.mark.parametrize("way", ["checkpoint", "function", "batch norm"])
def test_unknown_where_something_would_run_twice_or_is_inexact(way):
    model = Transformer(way, is_causal=False)
    guard = train(model, ahead(1))
    assert guard.history.model.target_shift == (1,) and not signs(guard)
    assert model.num_calls == (12 * 2 * 2 if way == "checkpoint" else 0)


class Hooks:
    """Hooks of a script on a model: what they are given, and gradients that it keeps."""

    def __init__(self, model, embedding):
        self.seen, self.kept = [], []
        model.head.register_forward_pre_hook(lambda module, args: self.note(args[0]))
        embedding.register_forward_hook(self.keep)

    def note(self, x):
        self.seen.append(x.detach().sum())

    def keep(self, module, args, output):
        output.retain_grad()
        output.register_hook(self.note)
        self.kept.append(output)


@pytest.mark.parametrize("kind", [Transformer, Translator, Recurrent])
def test_training_is_the_same_bit_by_bit(kind):
    """Hooks of the script run once in each pass, and see the same."""
    ends = []
    for is_guarded in (False, True):
        torch.manual_seed(3)
        model = Recurrent(nn.LSTM, both_ways=True) if kind is Recurrent else kind(is_causal=False)
        hooks = Hooks(model, model.target if kind is Translator else model.tokens)
        batch = {Transformer: ahead(1), Translator: translation, Recurrent: ahead(1, by_time=True)}[kind]
        guard = train(model, batch, guard=is_guarded)
        assert len(hooks.seen) == 24
        ends.append([*model.parameters(), *hooks.seen, *(x.grad for x in hooks.kept), torch.get_rng_state()])
    assert all(map(torch.equal, *ends))
    assert len(guard.history.model.target_shift) == 3


def test_the_gradient_is_that_of_the_engine():
    x = text(0)
    model = Transformer()
    tokens = []
    model.tokens.register_forward_hook(lambda module, args, output: tokens.append(output))
    y = model(x)
    found = gradient_at(y.grad_fn, {0: torch.ones_like(y)}, tokens[0].grad_fn)
    [expected] = torch.autograd.grad(y.sum(), tokens)
    torch.testing.assert_close(found, expected)
