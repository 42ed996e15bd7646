"""The demo's model, a decoder-only transformer over bytes, and its data: text that every machine with Python has."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cli import CommandError

VOCABULARY = 256
CONTEXT = 64
_MAX_BYTES = 3_000_000
_HELD_OUT = 0.05


class TransformerBlock(nn.Module):
    """Attention and a two-layer MLP, each behind a LayerNorm and with a residual connection."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        B, T, W = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, W))
        return x + self.mlp(self.norm2(x))


class CharTransformer(nn.Module):
    """Logits [B, T, 256] of the next byte, for bytes [B, T]; 1.9 million parameters by default."""

    def __init__(self, width: int = 192, num_heads: int = 4, num_blocks: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def write(model: nn.Module, prompt: str, num_bytes: int, generator: torch.Generator, temperature: float = 0.7) -> str:
    """`prompt`, continued by the model; what is not printable ASCII is shown as `?`."""
    device = next(model.parameters()).device
    text = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(num_bytes):
        logits = model(text[:, -CONTEXT:])[0, -1].float().cpu() / temperature
        drawn = torch.multinomial(logits.softmax(0), 1, generator=generator)
        text = torch.cat([text, drawn.to(device)[None]], dim=1)
    return "".join(chr(b) if 32 <= b < 127 or b == 10 else "?" for b in text[0].tolist())


def library_text(max_bytes: int = _MAX_BYTES) -> bytes:
    """The standard library's top-level modules, one after another by name, cut off at `max_bytes`."""
    folders = [Path(sysconfig.get_path("stdlib")), Path(os.__file__).parent]
    for folder in folders:
        text = bytearray()
        for path in sorted(folder.glob("*.py")):
            text += path.read_bytes().replace(b"\r\n", b"\n")
            if len(text) >= max_bytes:
                break
        if len(text) > 100 * CONTEXT:
            return bytes(text[:max_bytes])
    tried = " nor in ".join(map(str, dict.fromkeys(folders)))
    raise CommandError(f"found no *.py files of the standard library to train on, neither in {tried}")


class Corpus:
    """Batches from a text, the last twentieth of it held out."""

    def __init__(self, text: bytes, batch_size: int, seed: int, device: torch.device) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.batch_size = batch_size
        self.device = device
        self._num_train = int(len(text) * (1 - _HELD_OUT))
        self._generator = torch.Generator().manual_seed(seed)

    def _cut(self, low: int, high: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(low, high - CONTEXT, (count, 1), generator=generator)
        window = self.text[starts + torch.arange(CONTEXT + 1)].long().to(self.device)
        return window[:, :-1], window[:, 1:]

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, T] from random places of the training text."""
        return self._cut(0, self._num_train, self.batch_size, self._generator)

    def held_out(self, count: int = 64) -> tuple[Tensor, Tensor]:
        """Inputs and targets from the held-out text: the same ones at every call."""
        return self._cut(self._num_train, len(self.text), count, torch.Generator().manual_seed(1))
