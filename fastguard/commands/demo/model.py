"""A decoder-only transformer over bytes."""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY = 256
CONTEXT = 64


class TransformerBlock(nn.Module):
    """Attention and a two-layer MLP, each behind a LayerNorm and added to what came in."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, W = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, W))
        return x + self.mlp(self.norm2(x))


class CharTransformer(nn.Module):
    """Logits [B, T, 256] of the next byte, for bytes [B, T]; 1.9 million parameters as it stands."""

    def __init__(self, width: int = 192, num_heads: int = 4, num_blocks: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.positions.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


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
