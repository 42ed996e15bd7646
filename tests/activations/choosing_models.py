"""Small models with attention, as they are written elsewhere."""

from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention


class Heads(nn.Module):
    """Self-attention of several heads, keys shared by `num_heads // num_keys` of them."""

    def __init__(self, width=16, num_heads=4, num_keys=4, *, causal=True, imported=False, normed=False, dropout=0.0):
        super().__init__()
        self.num_heads, self.num_keys, self.causal, self.dropout = num_heads, num_keys, causal, dropout
        size = width // num_heads
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * num_keys * size)
        self.norm = nn.LayerNorm(size) if normed else nn.Identity()
        self.imported = imported

    def forward(self, x, mask=None):
        split = lambda y, heads: y.unflatten(-1, (heads, -1)).transpose(-2, -3)  # noqa: E731
        k, v = self.kv(x).chunk(2, -1)
        q, k, v = split(self.q(x), self.num_heads), split(k, self.num_keys), split(v, self.num_keys)
        attend = scaled_dot_product_attention if self.imported else F.scaled_dot_product_attention
        y = attend(
            self.norm(q), self.norm(k), v, mask, self.dropout, self.causal, enable_gqa=self.num_keys < self.num_heads
        )
        return self.o(y.transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    """Attention, then `mlp`, both added to what came."""

    def __init__(self, attention, mlp, width=16):
        super().__init__()
        self.attn, self.mlp = attention, mlp
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Language(nn.Module):
    """Token indices [B, T] to logits [B, T, 11]."""

    def __init__(self, *blocks, width=16, places=24):
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, width), nn.Embedding(places, width)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, 11)

    def forward(self, x):
        return self.head(self.blocks(self.tokens(x) + self.places.weight[: x.shape[1]]))
