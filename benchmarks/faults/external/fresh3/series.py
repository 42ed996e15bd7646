"""Sequences: Roman numbers, Morse, chaos, sums of bits, numbers in words, text, echoes, heartbeats."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case
from ..loop import Tensors, Watch
from ..nets import mlp
from ..sound2.case import classify, drawn, epochs, r_squared, share_right
from ..wild.case import dice_of
from .case import CUT_OR_FROZEN, OUTPUT_OR_LOSS, PARTED, TINY, either, entering, erred, fit, fitted

CASES: list[Case] = []
task = entering(CASES, __name__)


@functools.cache
def _romans() -> tuple[Tensors, Tensors]:
    """Numbers from 1 to 399 in Roman letters [N, 14], 0 where none is, and their value over 400."""
    signs = [(100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]
    rows = []
    for number in range(1, 400):
        word, rest = "", number
        for value, sign in signs:
            word, rest = word + sign * (rest // value), rest % value
        rows.append([" IVXLC".index(letter) for letter in word.ljust(15)])
    return data.parted(torch.tensor(rows), torch.arange(1.0, 400.0)[:, None] / 400.0, 0.8)


class _Reader(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.GRU, width: int = 32) -> None:
        super().__init__()
        self.letters, self.net, self.last = nn.Embedding(6, 12), kind(12, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.net(self.letters(words))[0][:, -1])


@task(
    0.9,
    lr_1000th=c.LOW,
    clipped=c.CLIPPED,
    in_thousands=c.TARGETS,
    heavy_momentum=either(c.SETTINGS, c.HIGH),
    put_back=c.OVERWRITTEN,
    sgd_lr_30=c.HIGH,
)
def roman_numbers(watch: Watch, fault: str = "") -> float:
    """What a Roman number is worth, by a GRU, Adam clipped at 1, validated; R²."""
    (x, y), (held, known) = _romans()
    scale = 1e5 if fault == "in-thousands" else 4.0
    model = _Reader()
    lr = 1e-5 if fault == "lr-1000th" else 1e-2
    optimizer = torch.optim.Adam(model.parameters(), lr)
    if fault in ("clipped", "sgd-lr-30"):
        optimizer = torch.optim.SGD(model.parameters(), 30.0 if fault == "sgd-lr-30" else 0.05)
    if fault == "heavy-momentum":
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.999)
    start = [p.detach().clone() for p in model.parameters()]

    def batches():
        for _ in range(22):
            if fault == "put-back":  # a checkpoint is loaded at the head of each epoch
                with torch.no_grad():
                    for p, old in zip(model.parameters(), start):
                        p.copy_(old)
            yield from epochs(1, 24, x, scale * y)

    limit = {"clipped": 1e-5, "sgd-lr-30": None}.get(fault, 1.0)
    fit(
        watch, model, optimizer, batches(), lambda x, y: F.mse_loss(model(x), y), max_norm=limit,
        val=erred(model, held, scale * known),
    )  # fmt: skip
    with torch.no_grad():
        return r_squared(model(held), scale * known)


_MORSE = ".- -... -.-. -.. . ..-. --. .... .. .--- -.- .-.. -- -. --- .--. --.- .-. ... - ..- ...- .-- -..- -.-- --.."


@functools.cache
def _keyed() -> tuple[Tensors, Tensors]:
    """Morse letters as a noisy tone's loudness [N, 1, 48]."""
    dice = dice_of(940)
    y = torch.randint(0, 26, (1600,), generator=dice)
    x, codes = torch.zeros(1600, 1, 48), _MORSE.split()
    for row, letter in enumerate(y.tolist()):
        at = int(torch.randint(0, 6, (), generator=dice))
        for sign in codes[letter]:
            long = 2 if sign == "." else 6
            x[row, 0, at : at + long] = 1.0
            at += long + 2
    return data.parted(x + 0.2 * torch.randn(x.shape, generator=dice), y)


@task(0.85, too_loud=c.INPUTS, twice_softmax=OUTPUT_OR_LOSS, dead_start=c.DEAD)
def morse(watch: Watch, fault: str = "") -> float:
    """Letters of Morse from loudness by convolutions, SGD with momentum; accuracy, chance 0.04."""
    (x, y), (held, known) = _keyed()
    if fault == "too-loud":
        x, held = 3e3 * x + 1e4, 3e3 * held + 1e4
    model = nn.Sequential(
        nn.Conv1d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(16, 32, 5, padding=2), nn.ReLU(),
        nn.MaxPool1d(2), nn.Flatten(), nn.Linear(384, 64), nn.ReLU(), nn.Linear(64, 26),
    )  # fmt: skip
    if fault == "dead-start":
        with torch.no_grad():
            model[7].bias.fill_(-30.0)
    loss = classify(model)
    if fault == "twice-softmax":
        loss = lambda x, y: F.cross_entropy(model(x).softmax(1), y)  # noqa: E731
    fit(watch, model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), epochs(10, 32, x, y), loss)
    return share_right(model, held, known)


@functools.cache
def _weather() -> tuple[Tensors, Tensors]:
    """Lorenz's weather: twelve states [N, 12, 3] and how much the next one differs."""
    state, rows = torch.tensor([1.0, 1.0, 20.0], dtype=torch.float64), []
    for _ in range(4200):
        for _ in range(4):
            x, y, z = state
            state = state + 0.01 * torch.stack([10.0 * (y - x), x * (28.0 - z) - y, x * y - 8.0 / 3.0 * z])
        rows.append(state)
    way = torch.stack(rows)[200:].float()
    pieces = way.unfold(0, 13, 3).mT
    return data.parted(pieces[:, :12].contiguous(), pieces[:, 12] - pieces[:, 11])


@task(0.9, raw=c.INPUTS, wrong_rows=c.LABELS, detached_state=CUT_OR_FROZEN)
def chaos_by_memory(watch: Watch, fault: str = "") -> float:
    """The next state of Lorenz's weather by an LSTM, AdamW; R²."""
    (x, y), (held, known) = _weather()
    mean, std = x.mean((0, 1)), x.std((0, 1))
    if fault == "raw":
        mean, std = -torch.tensor([2e3, 2e3, 2e3]), torch.tensor(0.05)
    if fault == "wrong-rows":
        y = y.roll(7, 0)
    net, last = nn.LSTM(3, 32, batch_first=True), nn.Linear(32, 3)
    model = nn.ModuleList([net, last])

    def step(x):
        h = net((x - mean) / std)[0][:, -1]
        return last(h.detach() if fault == "detached-state" else h)

    loss = lambda x, y: F.mse_loss(step(x), y / 5.0)  # noqa: E731
    fit(watch, model, torch.optim.AdamW(model.parameters(), 1e-2), drawn(300, 48, x, y), loss)
    with torch.no_grad():
        return r_squared(step(held), known / 5.0)


@task(0.9, faded=TINY, few_steps=a.SHORT)
def sums_of_bits(watch: Watch, fault: str = "") -> float:
    """Two numbers of ten bits, lowest first, added by a plain recurrent network; share of right bits, chance 0.5."""
    dice = dice_of(941)
    bits = torch.randint(0, 2, (2, 2500, 11), generator=dice)
    bits[:, :, 10] = 0
    weight = 2 ** torch.arange(11)
    total = (bits * weight).sum((0, 2))
    y = ((total[:, None] // weight) % 2).float()
    (x, y), (held, known) = data.parted(bits.movedim(0, 2).float(), y)
    net, last = nn.RNN(2, 24, batch_first=True), nn.Linear(24, 1)
    model = nn.ModuleList([net, last])
    if fault == "faded":
        for p in model.parameters():
            nn.init.normal_(p, std=1e-6)
    found = lambda x: last(net(x)[0])[..., 0]  # noqa: E731
    loss = lambda x, y: F.binary_cross_entropy_with_logits(found(x), y)  # noqa: E731
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    if fault == "faded":
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fit(watch, model, optimizer, drawn(12 if fault == "few-steps" else 350, 64, x, y), loss, max_norm=2.0)
    with torch.no_grad():
        return float(((found(held) > 0) == (known > 0.5)).float().mean())


class _Spelling(nn.Module):
    """Encoder and decoder of one layer each; begins are 10, digits 0 to 9 on one side, words' parts on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.digit, self.part, self.place = nn.Embedding(10, 32), nn.Embedding(31, 32), nn.Embedding(8, 32)
        self.net = nn.Transformer(32, 4, 1, 1, 64, 0.0, batch_first=True)
        self.last = nn.Linear(32, 30)

    def forward(self, number: torch.Tensor, said: torch.Tensor, hides: bool = True) -> torch.Tensor:
        place = self.place(torch.arange(8))
        mask = nn.Transformer.generate_square_subsequent_mask(said.shape[1]) if hides else None
        h = self.net(
            self.digit(number) + place[: number.shape[1]], self.part(said) + place[: said.shape[1]], tgt_mask=mask
        )
        return self.last(h)


@functools.cache
def _words() -> tuple[Tensors, Tensors]:
    """Numbers [N, 3] and what is said of them [N, 4]: hundreds, tens with a place of their own, ones, an end."""
    number = torch.randperm(1000, generator=dice_of(942))
    digits = torch.stack([number // 100, number // 10 % 10, number % 10], 1)
    said = torch.stack([digits[:, 2] + 20, digits[:, 0], digits[:, 1] + 10, torch.full_like(number, 0)], 1)
    return data.parted(digits, said, 0.8)


@task(0.85, target_told=PARTED, lr_300=c.HIGH, encoder_frozen=CUT_OR_FROZEN)
def numbers_in_words(watch: Watch, fault: str = "") -> float:
    """Three digits said in another order, a transformer of two sides, warm-up, validated; share said right, alone."""
    (x, y), (held, known) = _words()
    model = _Spelling()
    if fault == "encoder-frozen":
        for part in (model.digit, model.place, model.net.encoder, model.net.decoder):
            part.requires_grad_(False)

    def shifted(y):
        return torch.cat([torch.full((len(y), 1), 30), y[:, :-1]], 1)

    def loss(x, y):
        told = y if fault == "target-told" else shifted(y)
        return F.cross_entropy(model(x, told, fault != "target-told").flatten(0, 1), y.flatten())

    lr = 1.0 if fault == "lr-300" else 4e-3
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr, betas=(0.9, 0.98))
    ramp = lambda step: min(1.0, (step + 1) / 30)  # noqa: E731
    fit(
        watch, model, optimizer, drawn(260, 48, x, y), loss, max_norm=1.0, val=lambda: loss(held, known),
        schedule=functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=ramp),
    )  # fmt: skip
    said = torch.full((len(held), 1), 30)
    with torch.no_grad():
        for _ in range(4):
            said = torch.cat([said, model(held, said)[:, -1].argmax(1, keepdim=True)], 1)
    return float((said[:, 1:] == known).float().mean())


class _Letters(nn.Module):
    def __init__(self, hides: bool = True) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(128, 48), nn.Parameter(0.02 * torch.randn(24, 48))
        self.attention = nn.ModuleList([nn.MultiheadAttention(48, 4, batch_first=True) for _ in range(2)])
        self.thinking = nn.ModuleList([mlp((48, 96, 48), nn.GELU) for _ in range(2)])
        self.norms, self.hides = nn.ModuleList([nn.LayerNorm(48) for _ in range(5)]), hides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table(x) + self.place
        mask = torch.ones(24, 24).triu(1).bool() if self.hides else None
        for i in range(2):
            n = self.norms[i](h)
            h = h + self.attention[i](n, n, n, attn_mask=mask, need_weights=False)[0]
            h = h + self.thinking[i](self.norms[i + 2](h))
        return self.norms[4](h) @ self.table.weight.T


@task(0.2, sees_ahead=PARTED, lr_100=c.HIGH, unshifted=PARTED, wild_start=either(a.POOR, c.HIGH))
def letters_attending(watch: Watch, fault: str = "") -> float:
    """The next letter of source code, a small transformer with tied letters, cosine, validated; gain over one table."""
    (x, y), (held, known) = data.text(24)
    model = _Letters(fault != "sees-ahead")
    nn.init.normal_(model.table.weight, std=5.0 if fault == "wild-start" else 0.05)

    def loss(x, y):
        return F.cross_entropy(model(x).flatten(0, 1), (x if fault == "unshifted" else y).flatten())

    optimizer = torch.optim.AdamW(model.parameters(), 0.5 if fault == "lr-100" else 4e-3, betas=(0.9, 0.95))
    cosine = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=200)
    fit(
        watch,
        model,
        optimizer,
        drawn(200, 24, x, y),
        loss,
        max_norm=1.0,
        schedule=cosine,
        val=lambda: loss(held, known),
    )
    counts = torch.bincount(y.flatten(), minlength=128) + 1.0
    plain = -(counts / counts.sum()).log()[known].mean()
    model.hides = True
    with torch.no_grad():  # asked as it would be used: without what comes later
        return float(1.0 - F.cross_entropy(model(held)[:, -1], known[:, -1]) / plain)


@task(0.15)
def letter_from_its_neighbours(watch: Watch) -> float:
    """A letter from three on either side, their sum, sparse tables and SGD; gain over one table."""
    (x, _), (held, _) = data.text(7)
    model = nn.Sequential(nn.EmbeddingBag(128, 32), nn.Linear(32, 128))
    around = torch.tensor([0, 1, 2, 4, 5, 6])
    loss = lambda x: F.cross_entropy(model(x[:, around]), x[:, 3])  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), 2.0)
    fit(watch, model, optimizer, drawn(500, 128, x), loss, val=lambda: loss(held))
    counts = torch.bincount(x[:, 3], minlength=128) + 1.0
    with torch.no_grad():
        return float(1.0 - loss(held) / -(counts / counts.sum()).log()[held[:, 3]].mean())


class _Modes(nn.Module):
    """A diagonal linear system of complex modes, as state spaces have it."""

    def __init__(self, modes: int = 24) -> None:
        super().__init__()
        self.log_fade, self.turn = nn.Parameter(-3.0 * torch.rand(modes)), nn.Parameter(3.0 * torch.rand(modes))
        self.enter, self.leave = nn.Linear(1, modes), nn.Linear(2 * modes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = torch.polar(torch.exp(-self.log_fade.exp()), self.turn)
        powers = step ** torch.arange(x.shape[1] - 1, -1, -1)[:, None]
        state = (powers * self.enter(x)).sum(1)
        return self.leave(torch.cat([state.real, state.imag], 1))


@task(0.9)
def modes_of_a_string(watch: Watch) -> float:
    """What a noisy string does next, by complex modes that fade and turn; R²."""
    dice = dice_of(943)
    phase, rate = 6.28 * torch.rand(1200, 2, 1, generator=dice), torch.tensor([[0.3], [0.75]])
    wave = (torch.sin(phase + rate * torch.arange(33.0)) * torch.exp(-0.02 * torch.arange(33.0))).sum(1)
    wave = wave + 0.05 * torch.randn(wave.shape, generator=dice)
    (x, y), (held, known) = data.parted(wave[:, :32, None], wave[:, 32:])
    model = _Modes()
    fit(
        watch,
        model,
        torch.optim.Adam(model.parameters(), 1e-2),
        drawn(300, 48, x, y),
        lambda x, y: F.mse_loss(model(x), y),
    )
    with torch.no_grad():
        return r_squared(model(held), known)


@task(0.8)
def echo_of_a_reservoir(watch: Watch) -> float:
    """A large recurrent network that is never trained, and a linear reader that is; R² of an input five steps ago."""
    x = torch.randn(1500, 20, 1, generator=dice_of(944)).clamp(-2, 2)
    (x, y), (held, known) = data.parted(x, x[:, 14])
    net, last = nn.RNN(1, 120, batch_first=True), nn.Linear(120, 1)
    with torch.no_grad():
        net.weight_hh_l0.normal_(std=0.9 / math.sqrt(120))
        net.weight_ih_l0.mul_(3.0)
    net.requires_grad_(False)
    model = nn.ModuleList([net, last])
    found = lambda x: last(net(x)[0][:, -1])  # noqa: E731
    optimizer = torch.optim.Adam(last.parameters(), 5e-3)
    fit(watch, model, optimizer, drawn(400, 48, x, y), lambda x, y: F.mse_loss(found(x), y))
    with torch.no_grad():
        return r_squared(found(held), known)


@task(0.8, no_bottle=c.LABELS)
def heartbeats(watch: Watch, fault: str = "") -> float:
    """An autoencoder of regular beats, by which odd ones are told: area under the curve."""
    dice = dice_of(945)
    time = torch.linspace(0.0, 1.0, 64)

    def beats(count, odd):
        at = 0.4 + 0.05 * torch.randn(count, 1, generator=dice)
        wide = 0.03 + 0.05 * odd
        beat = torch.exp(-((time - at) / wide).square()) - 0.4 * torch.exp(-((time - at - 0.12) / 0.05).square())
        return beat + 0.05 * torch.randn(count, 64, generator=dice)

    train, usual, odd = beats(900, 0.0), beats(200, 0.0), beats(200, 1.0)
    if fault == "no-bottle":  # trained on the odd ones by mistake
        train = beats(900, 1.0)
    model = mlp((64, 32, 3, 32, 64), nn.ELU)
    loss = lambda x: F.mse_loss(model(x), x)  # noqa: E731
    fit(watch, model, torch.optim.Adam(model.parameters(), 3e-3), epochs(10, 32, train), loss, val=lambda: loss(usual))
    with torch.no_grad():
        off = [(model(x) - x).square().mean(1) for x in (usual, odd)]
    return float((off[1][None] > off[0][:, None]).float().mean())


@task(0.85)
def own_words_fed_back(watch: Watch) -> float:
    """A melody continued note by note, more and more from its own notes (scheduled sampling); share of right notes."""
    dice = dice_of(946)
    start, stride = torch.randint(0, 12, (2, 1500, 1), generator=dice)
    notes = (start + (1 + stride % 5) * torch.arange(14)) % 12
    train, held = notes[:1200], notes[1200:]
    table, cell, last = nn.Embedding(12, 24), nn.GRUCell(24, 48), nn.Linear(48, 12)
    model = nn.ModuleList([table, cell, last])

    def run(notes, own):
        h, note, out = torch.zeros(len(notes), 48), notes[:, 0], []
        for t in range(1, 14):
            h = cell(table(note), h)
            out.append(last(h))
            mine = (torch.rand(len(notes)) < own) & (t >= 3)
            note = torch.where(mine, out[-1].detach().argmax(1), notes[:, t])
        return torch.stack(out[2:], 1)

    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), 5e-3), model, 1.0)
    for step, (batch,) in enumerate(drawn(220, 48, train)):
        loss = F.cross_entropy(run(batch, step / 220).flatten(0, 1), batch[:, 3:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    with torch.no_grad():
        return float((run(held, 1.0).argmax(2) == held[:, 3:]).float().mean())


@task(0.9)
def how_many(watch: Watch) -> float:
    """Whether one letter comes more often than another, by attention to a question; accuracy."""
    x = torch.randint(0, 8, (2400, 15), generator=dice_of(947))
    keep = (x == 1).sum(1) != (x == 2).sum(1)
    x = x[keep]
    (x, y), (held, known) = data.parted(x, ((x == 1).sum(1) > (x == 2).sum(1)).long())
    table, asks, last = nn.Embedding(8, 16), nn.Parameter(torch.randn(4, 16)), nn.Linear(64, 2)
    model = nn.ModuleList([table, nn.ParameterList([asks]), last])

    def net(x):
        h = table(x)
        return last(((asks @ h.mT / 4.0).softmax(-1) @ h).flatten(1))

    fit(watch, model, torch.optim.NAdam(model.parameters(), 1e-2), epochs(6, 32, x, y), classify(net))
    return share_right(net, held, known)


@task(0.9)
def longer_and_longer(watch: Watch) -> float:
    """Which of two symbols came first, in strings that grow each eighty steps; accuracy at length 24."""
    dice = dice_of(948)

    def strings(count, length, dice=None):
        x = 2 + torch.randint(0, 6, (count, length), generator=dice)
        first = torch.randint(0, max(1, length // 2), (count,), generator=dice)
        y = torch.randint(0, 2, (count,), generator=dice)
        x[torch.arange(count), first] = y
        x[torch.arange(count), length - 1 - first] = 1 - y
        return x, y

    table, net, last = nn.Embedding(8, 12), nn.GRU(12, 32, batch_first=True), nn.Linear(32, 2)
    model = nn.ModuleList([table, net, last])
    found = lambda x: last(net(table(x))[0][:, -1])  # noqa: E731
    lengths = (6, 12, 18, 24)
    batches = (strings(48, lengths[step // 80]) for step in range(320))
    fit(watch, model, torch.optim.Adam(model.parameters(), 1e-2), batches, classify(found), max_norm=1.0)
    return share_right(found, *strings(500, 24, dice))


@task(0.5)
def codons(watch: Watch) -> float:
    """Classes of strings by a bag of triples and a linear reader, Adadelta; accuracy, chance 0.25."""
    dice = dice_of(949)
    y = torch.randint(0, 4, (1600,), generator=dice)
    lean = torch.randn(4, 64, generator=dice).softmax(1)
    x = torch.multinomial(lean[y], 20, replacement=True, generator=dice)
    (x, y), (held, known) = data.parted(x, y)
    model = nn.Sequential(nn.EmbeddingBag(64, 24, mode="mean"), nn.Linear(24, 4))
    val = fitted(model, held, known)
    fit(watch, model, torch.optim.Adadelta(model.parameters(), 2.0), epochs(12, 24, x, y), classify(model), val=val)
    return share_right(model, held, known)
