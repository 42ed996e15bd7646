"""Other models: routed, tied, normalised, graphs, sets, structured answers, large vocabularies, sequences."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from .. import data, nets
from .. import optimizers as o
from ..case import Case
from ..loop import Plan, Tensors
from ..qualities import accuracy, bits, r_squared, reconstruction
from ..sound.sequences import everywhere_loss, squared_loss
from .case import dice_of, wild_cases

_cases = functools.partial(wild_cases, __name__)


def _digits(seed: int, model, least: float = 0.92, **options) -> Plan:
    torch.manual_seed(seed)
    words = {"lr": 3e-3, "num_epochs": 6, **options}
    return Plan(model(), everywhere_loss, *data.digits(), accuracy, least, seed=seed, **words)


class Routed(nn.Module):
    """Each sample goes to one of six experts, by a router whose share of it scales the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 6)
        self.experts = nn.ModuleList(nets.mlp((64, 24, 10)) for _ in range(6))
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(1)
        top, chosen = shares.max(1, keepdim=True)
        self.balance = 6.0 * (F.one_hot(chosen[:, 0], 6).float().mean(0) * shares.mean(0)).sum()
        every = torch.stack([expert(x) for expert in self.experts], 1)
        return top * every.gather(1, chosen[..., None].expand(-1, -1, 10))[:, 0]


def routed(seed: int) -> Plan:
    """A mixture of experts, one a sample, with a loss that balances them."""

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return everywhere_loss(model, batch) + 0.02 * model.balance

    plan = _digits(seed, Routed, 0.9, lr=5e-3, num_epochs=8)
    plan.loss = loss
    return plan


class Headed(nn.Module):
    """A trunk with a second head that this task does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.pooler, self.head = nets.mlp((64, 48, 48)), nn.Linear(48, 48), nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.trunk(x)))


def unused_head(seed: int) -> Plan:
    """Two parameters never get a gradient, on purpose."""
    return _digits(seed, Headed)


class Tied(nn.Module):
    """An autoencoder whose decoder is the encoder turned over."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 48), nn.Linear(48, 16)
        self.out, self.middle = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = self.second(F.gelu(self.first(x)))
        return F.linear(F.gelu(F.linear(code, self.second.weight.T, self.middle)), self.first.weight.T, self.out)


def tied(seed: int) -> Plan:
    """Tied weights."""
    torch.manual_seed(seed)
    return Plan(
        Tied(),
        lambda model, batch: F.mse_loss(model(batch[0]), batch[0]),
        *data.digits(),
        reconstruction,
        0.4,
        lr=3e-3,
        num_epochs=8,
        seed=seed,
    )


def _normed(wrap, seed: int) -> Plan:
    def model() -> nn.Module:
        return nn.Sequential(wrap(nn.Linear(64, 48)), nn.ReLU(), wrap(nn.Linear(48, 48)), nn.ReLU(), nn.Linear(48, 10))

    return _digits(seed, model)


def weight_norm(seed: int) -> Plan:
    """Direction and size of each weight apart."""
    return _normed(parametrizations.weight_norm, seed)


def spectral_norm(seed: int) -> Plan:
    """Weights divided by their largest singular value."""
    return _normed(parametrizations.spectral_norm, seed)


def half_dropped(seed: int) -> Plan:
    """More than half of each layer is left out in training."""

    def model() -> nn.Module:
        layers = [nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.6), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.5)]
        return nn.Sequential(*layers, nn.Linear(64, 10))

    return _digits(seed, model, num_epochs=10)


def few_normed(seed: int) -> Plan:
    """BatchNorm over batches of six."""
    return _digits(
        seed, lambda: nets.mlp((64, 48, 48, 10), nn.ReLU, nn.BatchNorm1d), 0.88, lr=2e-3, num_epochs=4, batch_size=6
    )


class Words(nn.Module):
    """Next word out of many, with the embedding as output layer."""

    def __init__(self, num_words: int) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(num_words, 24), nets.mlp((48, 48, 24))
        nn.init.normal_(self.words.weight, std=0.05)

    def forward(self, pair: torch.Tensor) -> torch.Tensor:
        return self.mix(self.words(pair).flatten(1)) @ self.words.weight.T


def many_words(seed: int) -> Plan:
    """A softmax over three thousand words, few of them often."""
    dice, count = dice_of(110), 3000
    ranks = (torch.rand(4000, 2, generator=dice).pow(4) * count).long()
    after = (ranks[:, 0] * 7 + 11) % 40
    at_random = torch.rand(4000, generator=dice) < 0.2
    after = torch.where(at_random, (torch.rand(4000, generator=dice).pow(4) * count).long(), after)
    torch.manual_seed(seed)
    return Plan(
        Words(count),
        everywhere_loss,
        *data.parted(ranks, after),
        accuracy,
        0.1,
        lr=5e-3,
        num_epochs=4,
        batch_size=32,
        seed=seed,
        judged_by_loss=False,
    )


class Chained(nn.Module):
    """Scores of labels at each place, and of what follows what: a conditional random field."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.then = nets.mlp((5, 24, 4)), nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The best labels one by one, by their marginals as far as they are seen from the left."""
        scores = self.each(x)
        before, out = scores[:, 0], [scores[:, 0]]
        for place in range(1, x.shape[1]):
            before = (before[:, :, None] + self.then).logsumexp(1) + scores[:, place]
            out.append(before)
        return torch.stack(out, 1)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = self.each(x)
        path = scores.gather(2, y[..., None])[..., 0].sum(1) + self.then[y[:, :-1], y[:, 1:]].sum(1)
        return (self(x)[:, -1].logsumexp(1) - path).mean()


def chained(seed: int) -> Plan:
    """Labels that follow one another by a rule, under noise: a sum over places, and a floor."""
    dice = dice_of(111)
    labels = [torch.randint(4, (900,), generator=dice)]
    for _ in range(7):
        labels.append((labels[-1] + (torch.rand(900, generator=dice) < 0.8).long()) % 4)
    y = torch.stack(labels, 1)
    x = torch.cat([F.one_hot(y, 4).float(), torch.zeros(900, 8, 1)], 2) + 0.8 * torch.randn(900, 8, 5, generator=dice)
    torch.manual_seed(seed)
    return Plan(
        Chained(),
        lambda model, batch: model.loss(*batch),
        *data.parted(x, y),
        accuracy,
        0.7,
        lr=1e-2,
        num_epochs=10,
        seed=seed,
    )


def aligned(seed: int) -> Plan:
    """Connectionist temporal classification of short strings in longer lines."""
    dice = dice_of(112)
    y = torch.randint(1, 5, (800, 3), generator=dice)
    y[:, 1] = (y[:, 0] + y[:, 1].remainder(3)) % 4 + 1
    y[:, 2] = (y[:, 1] + y[:, 2].remainder(3)) % 4 + 1
    line = F.one_hot(y.repeat_interleave(3, 1), 5).float() + 0.3 * torch.randn(800, 9, 5, generator=dice)
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        logs, n = model(batch[0]).log_softmax(2).transpose(0, 1), len(batch[0])
        return F.ctc_loss(logs, batch[1], torch.full((n,), 9), torch.full((n,), 3))

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        best, right = model(held_out[0]).argmax(2), 0
        for row, wanted in zip(best.tolist(), held_out[1].tolist()):
            said = [b for a, b in zip([0, *row], row) if b != a and b]
            right += said == wanted
        return right / len(best)

    model = nets.Recurrent(nn.GRU, 5, 5, 24, is_symbolic=False, both_ways=True)
    return Plan(model, loss, *data.parted(line, y), quality, 0.6, lr=1e-2, num_epochs=10, seed=seed)


class OverGraphs(nn.Module):
    """Graphs of ten nodes: three rounds of sums over neighbours, and a sum over nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nets.mlp((size, 24, 24)) for size in (1, 24, 24))
        self.head = nn.Linear(24, 1)

    def forward(self, graphs: torch.Tensor) -> torch.Tensor:
        nodes = graphs.sum(2, keepdim=True) / 5.0
        for layer in self.layers:
            nodes = layer(nodes + graphs @ nodes / 5.0)
        return self.head(nodes.mean(1))


def triangles(seed: int) -> Plan:
    """How many triangles a graph has."""
    dice = dice_of(113)
    share = 0.2 + 0.5 * torch.rand(900, 1, 1, generator=dice)
    upper = (torch.rand(900, 10, 10, generator=dice) < share).float().triu(1)
    graphs = upper + upper.transpose(1, 2)
    count = torch.diagonal(graphs @ graphs @ graphs, dim1=1, dim2=2).sum(1, keepdim=True) / 6.0
    torch.manual_seed(seed)
    wanted = (count - count.mean()) / count.std()
    return Plan(
        OverGraphs(), squared_loss, *data.parted(graphs, wanted), r_squared, 0.8, lr=5e-3, num_epochs=14, seed=seed
    )


class OverSets(nn.Module):
    """Attention among the elements of a set, then a learnt query over them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query = nn.Linear(2, 16), nn.Parameter(0.1 * torch.randn(1, 1, 16))
        self.among, self.pool = (nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))
        self.head = nets.mlp((16, 16, 1))

    def forward(self, sets: torch.Tensor) -> torch.Tensor:
        x = self.embed(sets)
        x = x + self.among(x, x, x, need_weights=False)[0]
        return self.head(self.pool(self.query.expand(len(x), -1, -1), x, x, need_weights=False)[0][:, 0])


def largest(seed: int) -> Plan:
    """The largest first coordinate in a set of eight points."""
    sets = torch.rand(1000, 8, 2, generator=dice_of(114))
    torch.manual_seed(seed)
    wanted = 4.0 * sets[..., 0].amax(1, keepdim=True) - 3.5
    return Plan(OverSets(), squared_loss, *data.parted(sets, wanted), r_squared, 0.6, lr=5e-3, num_epochs=12, seed=seed)


class Translating(nn.Module):
    """An encoder, and a decoder that is given the right symbols so far."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 16)
        self.reader, self.writer = nn.GRU(16, 48, batch_first=True), nn.GRU(16, 48, batch_first=True)
        self.head = nn.Linear(48, 12)

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        source, before = both.chunk(2, 1)
        state = self.reader(self.tokens(source))[1]
        return self.head(self.writer(self.tokens(before), state)[0])


def reversed_strings(seed: int) -> Plan:
    """Strings of five said backwards, with teacher forcing."""
    source = torch.randint(2, 8, (1400, 5), generator=dice_of(115))
    wanted = source.flip(1)
    before = torch.cat([torch.ones(1400, 1, dtype=torch.long), wanted[:, :-1]], 1)
    torch.manual_seed(seed)
    split = data.parted(torch.cat([source, before], 1), wanted)
    return Plan(Translating(), everywhere_loss, *split, accuracy, 0.6, lr=1e-2, num_epochs=8, seed=seed)


def characters(seed: int) -> Plan:
    """Source text, byte by byte, after convolutions that look back only."""

    class Back(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(128, 24), nn.Linear(48, 128)
            self.first, self.second = nn.Conv1d(24, 48, 4), nn.Conv1d(48, 48, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.tokens(x).transpose(1, 2)
            for conv in (self.first, self.second):
                x = F.gelu(conv(F.pad(x, (3, 0))))
            return self.head(x.transpose(1, 2))

    torch.manual_seed(seed)
    split = data.text(16, 1400, 150)
    return Plan(Back(), everywhere_loss, *split, bits, -4.0, lr=5e-3, num_epochs=5, seed=seed)


def gaps(seed: int) -> Plan:
    """Three symbols in ten are hidden, and asked for: a masked language model on strings with a rule."""
    dice = dice_of(116)
    start, gap = torch.randint(10, (1300, 1), generator=dice), torch.randint(1, 4, (1300, 1), generator=dice)
    whole = (start + gap * torch.arange(8)) % 10
    hidden = torch.rand(1300, 8, generator=dice) < 0.3
    seen = torch.where(hidden, 10, whole)
    wanted = torch.where(hidden, whole, -100)
    torch.manual_seed(seed)

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        right = model(held_out[0]).argmax(-1) == held_out[1]
        return float(right[held_out[1] >= 0].float().mean())

    model = nets.Attending(11, 10, 8, 32, 1, norm_first=False)
    return Plan(model, everywhere_loss, *data.parted(seen, wanted), quality, 0.6, lr=1e-2, num_epochs=14, seed=seed)


def gated(seed: int) -> Plan:
    """A long memory task whose loss stands for a while before it falls."""
    torch.manual_seed(seed)
    bit = torch.randint(2, (1400, 12, 1), generator=dice_of(117)).float()
    wanted = (bit[:, 1:3, 0].sum(1) % 2).long()
    model = nets.Recurrent(nn.LSTM, 1, 2, 24, is_symbolic=False, everywhere=False)
    split = data.parted(2.0 * bit[:, :5] - 1.0, wanted)
    return Plan(model, everywhere_loss, *split, accuracy, 0.95, lr=1.5e-2, num_epochs=12, max_norm=1.0, seed=seed)


_CLIPPED = {"max_norm": 1.0}
_SGD = {"optimizer": o.MOMENTUM, "lr": 5e-2}
CASES: tuple[Case, ...] = (
    *_cases("digits-routed", "one expert a sample", routed, adam={}, clipped={**_CLIPPED}),
    *_cases("digits-unused-head", "a head that is not used", unused_head, adam={}, sgd={**_SGD}),
    *_cases("digits-tied", "tied autoencoder", tied, adam={}, adamw={"optimizer": o.ADAMW, "lr": 5e-3}),
    *_cases("digits-weight-norm", "weight norm", weight_norm, adam={}, sgd={**_SGD}),
    *_cases("digits-spectral-norm", "spectral norm", spectral_norm, adam={}, sgd={**_SGD}),
    *_cases("digits-half-dropped", "dropout of 0.6", half_dropped, adam={}, sgd={**_SGD}),
    *_cases("digits-few-normed", "BatchNorm over six", few_normed, adam={}, sgd={"optimizer": o.MOMENTUM, "lr": 1e-2}),
    *_cases("many-words", "three thousand classes", many_words, adam={}, clipped={**_CLIPPED}),
    *_cases("chained-labels", "conditional random field", chained, adam={}, sgd={"optimizer": o.MOMENTUM, "lr": 1e-2}),
    *_cases("aligned-lines", "CTC", aligned, adam={}, clipped={**_CLIPPED}),
    *_cases("triangles", "graphs", triangles, adam={}, clipped={**_CLIPPED}),
    *_cases(
        "largest-of-set",
        "sets, attention",
        largest,
        adam={},
        adamw_warm={"optimizer": o.ADAMW, "schedule": o.warm_cosine},
    ),
    *_cases("reversed-strings", "teacher forcing", reversed_strings, adam={}, clipped={**_CLIPPED}),
    *_cases(
        "characters-back",
        "causal convolutions",
        characters,
        adam={},
        adamw_warm={"optimizer": o.ADAMW, "schedule": o.warm_cosine},
    ),
    *_cases("gaps", "masked symbols", gaps, adam={}, adamw_warm={"optimizer": o.ADAMW, "schedule": o.warm_cosine}),
    *_cases("parity-gated", "a plateau before the fall", gated, adam={}, rmsprop={"optimizer": o.RMSPROP, "lr": 5e-3}),
)
