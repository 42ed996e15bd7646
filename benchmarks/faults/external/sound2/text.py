"""Sequences: characters, sums, small languages, by networks that the other groups do not have."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from .. import optimizers as o
from ..case import Case
from ..loop import Watch
from ..nets import mlp
from ..wild.case import dice_of
from . import case as c

CASES: list[Case] = []
setup = functools.partial(c.setup, CASES, __name__)


def _bits(model: nn.Module, u: torch.Tensor, v: torch.Tensor) -> float:
    """Quality of a language model: 1 + minus the bits a character / 7."""
    with torch.no_grad():
        return 1.0 - float(F.cross_entropy(model(u).flatten(0, -2), v.flatten())) / 0.6931 / 7.0


def _everywhere(model: nn.Module) -> c.Loss:
    return lambda a, b: F.cross_entropy(model(a).flatten(0, -2), b.flatten())


@setup(0.4)
def bigram_table(watch: Watch) -> float:
    """A table of which character follows which, with a large rate, as the first model of many courses."""
    (x, y), (u, v) = data.text(20)
    model = nn.Embedding(128, 128)
    c.train(watch, model, torch.optim.AdamW(model.parameters(), lr=0.05), c.drawn(250, 32, x, y), _everywhere(model))
    return _bits(model, u, v)


@setup(0.4)
def names_mlp(watch: Watch) -> float:
    """Three characters before, embedded and side by side, with BatchNorm and tanh; the rate falls once."""
    (x, y), (u, v) = data.text(20)
    contexts = [(t.unfold(1, 3, 1).flatten(0, 1), w[:, 2:].flatten()) for t, w in ((x, y), (u, v))]
    model = nn.Sequential(
        nn.Embedding(128, 10),
        nn.Flatten(),
        nn.Linear(30, 100, bias=False),
        nn.BatchNorm1d(100),
        nn.Tanh(),
        nn.Linear(100, 128),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    c.train(
        watch,
        model,
        optimizer,
        c.drawn(500, 64, *contexts[0]),
        c.classify(model),
        schedule=lambda it: torch.optim.lr_scheduler.MultiStepLR(it, [350], 0.1),
    )
    return _bits(model, *contexts[1])


class Dilated(nn.Module):
    """Causal convolutions further and further apart, with gates and a sum of all they say."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(128, width), nn.Linear(width, 128)
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.tokens(x).transpose(1, 2)
        said = torch.zeros_like(state)
        for layer in self.layers:
            value, gate = layer(F.pad(state, (layer.dilation[0], 0))).chunk(2, 1)
            step = value.tanh() * gate.sigmoid()
            state, said = state + step, said + step
        return self.head(said.relu().transpose(1, 2))


@setup(0.42)
def dilated_text(watch: Watch) -> float:
    """Gated dilated convolutions over characters, warm-up and cosine, clipped at one."""
    (x, y), (u, v) = data.text(20)
    model = Dilated()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    c.train(
        watch,
        model,
        optimizer,
        c.drawn(250, 32, x, y),
        _everywhere(model),
        max_norm=1.0,
        schedule=lambda it: torch.optim.lr_scheduler.OneCycleLR(it, 4e-3, 250),
        val_loss=lambda: _everywhere(model)(u, v),
    )
    return _bits(model, u, v)


class Scanning(nn.Module):
    """A selective diagonal recurrence: how much is kept hangs on the input."""

    def __init__(self, width: int = 32, num_layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, width)
        self.inner = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(num_layers))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(num_layers))
        self.rates = nn.Parameter(torch.linspace(-3.0, 1.0, width).repeat(num_layers, 1))
        self.head = nn.Linear(width, 128, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.tokens(x)
        for inner, outer, norm, rate in zip(self.inner, self.outer, self.norms, self.rates):
            value, step, gate = inner(norm(state)).chunk(3, -1)
            step = F.softplus(step)
            kept = (-step * rate.exp()).exp()
            held, rows = torch.zeros_like(value[:, 0]), []
            for t in range(x.shape[1]):
                held = kept[:, t] * held + step[:, t] * value[:, t]
                rows.append(held)
            state = state + outer(torch.stack(rows, 1) * F.silu(gate))
        return self.head(state)


@setup(0.42)
def scanned_text(watch: Watch) -> float:
    """A selective state space over characters, embeddings shared with the head, warm-up then a constant rate."""
    (x, y), (u, v) = data.text(20)
    model = Scanning()
    c.train(
        watch,
        model,
        torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95), weight_decay=0.1),
        c.drawn(200, 32, x, y),
        _everywhere(model),
        max_norm=1.0,
        schedule=lambda it: torch.optim.lr_scheduler.LinearLR(it, 0.05, 1.0, 20),
    )
    return _bits(model, u, v)


class MixedPlaces(nn.Module):
    """A causal mixer: a triangular matrix over places, then one over channels."""

    def __init__(self, length: int = 20, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(128, width), nn.Linear(width, 128)
        self.places = nn.ParameterList(torch.randn(length, length) / length for _ in range(2))
        self.channels = nn.ModuleList(mlp((width, 2 * width, width), nn.GELU) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.tokens(x)
        for i in range(2):
            state = state + self.places[i].tril() @ self.norms[2 * i](state)
            state = state + self.channels[i](self.norms[2 * i + 1](state))
        return self.head(state)


@setup(0.42)
def mixed_text(watch: Watch) -> float:
    """A mixer over characters, its matrices by orthogonalised momentum, the rest by AdamW: two optimizers, one loss."""
    (x, y), (u, v) = data.text(20)
    model = MixedPlaces()
    inner = [*model.places, *(p for p in model.channels.parameters() if p.ndim == 2)]
    known = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in known]
    first = watch.wrap(torch.optim.Muon(inner, lr=0.02), model)
    second = watch.wrap(torch.optim.AdamW(rest, lr=4e-3), model)
    for a, b in c.drawn(220, 32, x, y):
        model.zero_grad()
        loss = _everywhere(model)(a, b)
        loss.backward()
        for optimizer in (first, second):
            optimizer.step()
            watch.observe(optimizer, loss=loss)
    return _bits(model.eval(), u, v)


@setup(0.4)
def carried_state(watch: Watch) -> float:
    """Truncated backpropagation: the state of a GRU goes on from piece to piece of sixteen running texts."""
    (x, y), (u, v) = data.text(20, 1600)
    tokens, gru, head = nn.Embedding(128, 24), nn.GRU(24, 64, batch_first=True), nn.Linear(64, 128)
    model = nn.ModuleList([tokens, gru, head])
    optimizer = watch.wrap(torch.optim.RMSprop(model.parameters(), lr=2e-3), model, 0.5)
    streams = x.reshape(16, -1), y.reshape(16, -1)
    for _ in range(2):
        state = None
        for at in range(0, streams[0].shape[1] - 19, 20):
            optimizer.zero_grad()
            out, state = gru(tokens(streams[0][:, at : at + 20]), None if state is None else state.detach())
            loss = F.cross_entropy(head(out).flatten(0, 1), streams[1][:, at : at + 20].flatten())
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss)
    return _bits(lambda text: head(gru(tokens(text))[0]), u, v)


@setup(0.9)
def shared_remainders(watch: Watch) -> float:
    """Sums modulo 13 by all of the table at once under strong decay: a plateau, then it is understood."""
    p = 13
    pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))
    order = torch.randperm(p * p, generator=dice_of(511))
    x, y = pairs[order], pairs[order].sum(1) % p
    table, body = nn.Embedding(p, 32), mlp((64, 128, p))
    model = nn.ModuleList([table, body])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1.0, betas=(0.9, 0.98))
    c.train(
        watch,
        model,
        optimizer,
        c.whole(400, x[:140], y[:140]),
        lambda a, b: F.cross_entropy(body(table(a).flatten(1)), b),
    )
    return float((body(table(x[:140]).flatten(1)).argmax(1) == y[:140]).float().mean())


@setup(0.8)
def aligned_without_places(watch: Watch) -> float:
    """Connectionist temporal classification of noisy tones; quality is 1 minus the share of symbols said wrong."""
    dice = dice_of(512)
    said = torch.randint(1, 6, (400, 4), generator=dice)
    codes = torch.randn(6, 8, generator=dice) * 1.5
    frames = codes[said.repeat_interleave(4, 1)] + 0.3 * torch.randn(400, 16, 8, generator=dice)
    gru, head = nn.GRU(8, 32, batch_first=True, bidirectional=True), nn.Linear(64, 6)
    model = nn.ModuleList([gru, head])

    def logs(a: torch.Tensor) -> torch.Tensor:
        return head(gru(a)[0]).log_softmax(-1)

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        lengths = torch.full((len(a),), 16), torch.full((len(a),), 4)
        return F.ctc_loss(logs(a).transpose(0, 1), b, *lengths, zero_infinity=True)

    c.train(
        watch, model, torch.optim.Adam(model.parameters(), lr=8e-3), c.epochs(14, 20, frames[:320], said[:320]), loss
    )
    with torch.no_grad():
        best = logs(frames[320:]).argmax(-1)
    right = 0
    for row, wanted in zip(best.tolist(), said[320:].tolist()):
        heard = [a for a, b in zip(row, [0, *row]) if a != b and a]
        merged = [a for a, b in zip(wanted, [0, *wanted]) if a != b]
        right += heard in (merged, wanted)
    return right / 80


@setup(0.8)
def backwards_with_attention(watch: Watch) -> float:
    """A decoder that looks at an encoder's states writes numbers with their digits the other way round."""
    dice = dice_of(513)
    x = torch.randint(0, 8, (1500, 6), generator=dice)
    enter, encoder, decoder = nn.Embedding(9, 24), nn.GRU(24, 48, batch_first=True), nn.GRU(24, 48, batch_first=True)
    look, head = nn.Linear(48, 48), nn.Linear(96, 8)
    model = nn.ModuleList([enter, encoder, decoder, look, head])

    def logits(a: torch.Tensor) -> torch.Tensor:
        states, last = encoder(enter(a))
        before = torch.cat([torch.full((len(a), 1), 8), a.flip(1)[:, :-1]], 1)
        asked = decoder(enter(before), last)[0]
        weights = (look(asked) @ states.transpose(1, 2) / math.sqrt(48)).softmax(-1)
        return head(torch.cat([asked, weights @ states], -1))

    c.train(
        watch,
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        c.epochs(8, 32, x[:1200]),
        lambda a: F.cross_entropy(logits(a).flatten(0, 1), a.flip(1).flatten()),
        max_norm=1.0,
    )
    with torch.no_grad():
        return float((logits(x[1200:]).argmax(-1) == x[1200:].flip(1)).float().mean())


@setup(0.9)
def code_or_prose(watch: Watch) -> float:
    """Lines of the library or shuffled ones: a bag of hashed pairs with sparse gradients, decaying rate."""
    (x, _), (u, _) = data.text(20)
    dice = dice_of(514)

    def told(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = rows.gather(1, torch.rand(rows.shape, generator=dice).argsort(1))
        both = torch.cat([rows, mixed])
        return (both[:, :-1] * 131 + both[:, 1:]) % 4001, torch.arange(2).repeat_interleave(len(rows))

    bag, head = nn.EmbeddingBag(4001, 16, sparse=True), nn.Linear(16, 2)
    model = nn.ModuleList([bag, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    c.train(
        watch,
        model,
        optimizer,
        c.epochs(4, 32, *told(x)),
        lambda a, b: F.cross_entropy(head(bag(a)), b),
        schedule=lambda it: torch.optim.lr_scheduler.ExponentialLR(it, 0.997),
    )
    return c.share_right(lambda a: head(bag(a)), *told(u)) + 0.15


def _chains(count: int, dice: torch.Generator) -> torch.Tensor:
    jumps = torch.tensor([[1, 3], [2, 4], [0, 5], [4, 0], [5, 1], [3, 2]])
    rows = [torch.randint(0, 6, (count,), generator=dice)]
    for _ in range(15):
        rows.append(jumps[rows[-1], (torch.rand(count, generator=dice) < 0.2).long()])
    return torch.stack(rows, 1)


@setup(0.6)
def hidden_states(watch: Watch) -> float:
    """A hidden Markov model by its forward likelihood, all parameters free logits; quality: of the nats to be won."""
    dice = dice_of(515)
    rows = _chains(300, dice)
    model = nn.ParameterDict(
        {
            "begin": nn.Parameter(torch.randn(6)),
            "turn": nn.Parameter(torch.randn(6, 6)),
            "say": nn.Parameter(torch.randn(6, 6)),
        }
    )

    def loss(a: torch.Tensor) -> torch.Tensor:
        turn, say = model["turn"].log_softmax(1), model["say"].log_softmax(1)
        state = model["begin"].log_softmax(0) + say[:, a[:, 0]].T
        for t in range(1, a.shape[1]):
            state = (state[:, :, None] + turn).logsumexp(1) + say[:, a[:, t]].T
        return -state.logsumexp(1).mean()

    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=0.1), c.whole(150, rows[:200]), loss)
    with torch.no_grad():
        return (16 * math.log(6) - float(loss(rows[200:]))) / (16 * math.log(6) - math.log(6) - 15 * 0.5)


@setup(0.85)
def few_steps_of_chains(watch: Watch) -> float:
    """A run of forty steps: a vanilla recurrent net learns which symbols can follow; cosine to zero."""
    dice = dice_of(516)
    rows = _chains(900, dice)
    tokens, rnn, head = nn.Embedding(6, 16), nn.RNN(16, 32, batch_first=True), nn.Linear(32, 6)
    model = nn.ModuleList([tokens, rnn, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def logits(a: torch.Tensor) -> torch.Tensor:
        return head(rnn(tokens(a))[0])

    batches: Iterator[c.Tensors] = c.drawn(40, 64, rows[:800, :-1], rows[:800, 1:])
    c.train(
        watch,
        model,
        optimizer,
        batches,
        lambda a, b: F.cross_entropy(logits(a).flatten(0, 1), b.flatten()),
        schedule=lambda it: torch.optim.lr_scheduler.LambdaLR(it, o.cosine(40)),
    )
    with torch.no_grad():
        return float((logits(rows[800:, :-1]).argmax(-1) == rows[800:, 1:]).float().mean()) + 0.1
