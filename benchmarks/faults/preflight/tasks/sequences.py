"""Text, rows and other sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .planned import Planned, load, opt, task, windows


class Transformer(nn.Module):
    """A small language model."""

    def __init__(self, width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, width), nn.Embedding(64, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next characters."""
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        h = self.tokens(x) + self.places(torch.arange(length))
        return self.head(self.blocks(h, mask=mask, is_causal=True))


def next_character(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over all places."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@task
def transformer_language_model() -> Planned:
    x, y = windows(32)
    return Planned(Transformer(), x, y, next_character, opt("AdamW", lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1), 16)


@task
def transformer_warming_up() -> Planned:
    x, y = windows(32)

    def schedule(planned: Planned) -> None:
        torch.optim.lr_scheduler.LambdaLR(planned.made, lambda step: min(1.0, step / 1000))

    return Planned(Transformer(), x, y, next_character, opt("AdamW", lr=1e-3), 16, prepare=schedule)


class Recurrent(nn.Module):
    """Embedding, recurrent layer, linear layer."""

    def __init__(self, kind: type[nn.Module], num_out: int, *, last_only: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.recurrent = kind(32, 64, batch_first=True)
        self.head = nn.Linear(64, num_out)
        self.last_only = last_only

    def forward(self, x: Tensor) -> Tensor:
        """Logits at each place, or at the last."""
        h, _ = self.recurrent(self.embedding(x))
        return self.head(h[:, -1] if self.last_only else h)


@task
def gru_language_model() -> Planned:
    x, y = windows(32)
    return Planned(Recurrent(nn.GRU, 64), x, y, next_character, opt("Adam", lr=2e-3), 16)


@task
def lstm_classifier() -> Planned:
    x, _ = windows(16)
    y = (x == 32).sum(1).clamp(max=3)  # how many blanks
    return Planned(Recurrent(nn.LSTM, 4, last_only=True), x, y, nn.CrossEntropyLoss(), opt("Adam", lr=3e-3), 32)


@task
def rnn_copy_task() -> Planned:
    x = torch.randint(1, 9, (200, 12))
    y = torch.cat([torch.zeros(200, 4, dtype=torch.long), x[:, :-4]], 1)
    return Planned(Recurrent(nn.RNN, 64), x, y, next_character, opt("RMSprop", lr=1e-3), 32)


@task
def time_major_rnn() -> Planned:
    x, y = windows(24)
    model = Recurrent(nn.GRU, 64)
    model.recurrent.batch_first = False  # type: ignore[assignment]
    return Planned(model, x, y, next_character, batches=[(x[:16].t(), y[:16].t())], optimizer=opt("Adam", lr=2e-3))


class Attention(nn.Module):
    """Classifies a set of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.block(self.embed(x)).mean(1))


@task
def rows_as_tokens() -> Planned:
    x, y = load("digits")
    return Planned(Attention(), (x / 16).reshape(-1, 8, 8), y, nn.CrossEntropyLoss(), opt("Adam", lr=1e-3), 64)
