"""Models that several tasks build on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn


def mlp(sizes: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU, *between: Callable[[int], nn.Module]):
    """Linear layers with an activation after each but the last; `between` makes modules that stand before it."""
    layers: list[nn.Module] = []
    pairs = list(itertools.pairwise(sizes))
    for number, (low, high) in enumerate(pairs):
        layers.append(nn.Linear(low, high))
        if number < len(pairs) - 1:
            layers += [*(make(high) for make in between), activation()]
    return nn.Sequential(*layers)


class Recurrent(nn.Module):
    """An answer to a sequence: of symbols [B, T] if there is a vocabulary, else of features [B, T, F].

    Args:
        kind: nn.RNN, nn.GRU or nn.LSTM.
        num_in: size of the vocabulary, or features.
        num_out: size of an answer.
        is_symbolic: whether inputs are symbols.
        everywhere: an answer at each place [B, T, C], else at the last one [B, C].
    """

    def __init__(
        self,
        kind: type[nn.RNNBase],
        num_in: int,
        num_out: int,
        width: int = 48,
        *,
        is_symbolic: bool = True,
        everywhere: bool = True,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_in, 16) if is_symbolic else nn.Identity()
        size = 16 if is_symbolic else num_in
        self.recurrent = kind(size, width, batch_first=True)
        self.head = nn.Linear(width, num_out)
        self.everywhere = everywhere

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        states = self.recurrent(self.tokens(sequence))[0]
        return self.head(states if self.everywhere else states[:, -1])


class Attending(nn.Module):
    """A transformer over symbols [B, T], or over features [B, T, F]: an answer at each place, or of their mean."""

    def __init__(
        self,
        num_in: int,
        num_out: int,
        length: int,
        width: int = 32,
        num_blocks: int = 2,
        *,
        is_symbolic: bool = True,
        is_causal: bool = False,
        pooled: bool = False,
        norm_first: bool = True,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_in, width) if is_symbolic else nn.Linear(num_in, width)
        self.places = nn.Parameter(0.1 * torch.randn(length, width))
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=norm_first)
        self.blocks = nn.TransformerEncoder(block, num_blocks, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, num_out)
        self.is_causal, self.pooled = is_causal, pooled

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        length = sequence.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length) if self.is_causal else None
        states = self.blocks(self.embed(sequence) + self.places[:length], mask=mask, is_causal=self.is_causal)
        return self.head(states.mean(1) if self.pooled else states)


def cnn(num_out: int = 10, width: int = 12, activation: Callable[[], nn.Module] = nn.ReLU):
    """Two convolutions and a linear layer, for images [B, 1, 8, 8]."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        activation(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        activation(),
        nn.Flatten(),
        nn.Linear(2 * width * 16, num_out),
    )
