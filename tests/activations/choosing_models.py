"""Small models with attention and experts, as they are written elsewhere."""

import torch
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


class Experts(nn.Module):
    """A mixture of experts: each token goes to the `top_k` likeliest."""

    def __init__(self, width=16, num=8, top_k=2, router=None):
        super().__init__()
        self.gate = nn.Linear(width, num, bias=False) if router is None else router
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num))
        self.top_k = top_k

    def forward(self, x):
        self.probabilities = self.gate(x).softmax(-1)
        weights, chosen = self.probabilities.topk(self.top_k)
        weights = [(weights * (chosen == i)).sum(-1, keepdim=True) for i in range(len(self.experts))]
        return sum(w * expert(x) for w, expert in zip(weights, self.experts, strict=True))

    def imbalance(self):
        """Fedus et al. 2022, equation 4, of the first choice."""
        p = self.probabilities.flatten(0, -2)
        return p.shape[1] * (F.one_hot(p.argmax(-1), p.shape[1]).float().mean(0) * p.mean(0)).sum()


class TopRouter(nn.Module):
    """As Transformers has it: logits, the scores of the chosen, and which they are."""

    def __init__(self, width=16, num=8, top_k=2):
        super().__init__()
        self.num_experts, self.top_k = num, top_k
        self.weight = nn.Parameter(torch.randn(num, width) / 4)

    def forward(self, x):
        logits = F.linear(x.flatten(0, -2), self.weight)
        scores, chosen = logits.softmax(-1).topk(self.top_k)
        return logits, scores, chosen


class StackedExperts(nn.Module):
    """The weights of all experts in tensors of three dimensions."""

    def __init__(self, width=16, num=8):
        super().__init__()
        self.up = nn.Parameter(torch.randn(num, width, width) / 4)

    def forward(self, x, chosen, scores):
        return torch.einsum("tk,tkij,tj->ti", scores, self.up[chosen], x.flatten(0, -2)).view_as(x)


class StackedMoe(nn.Module):
    """A sparse block as Mixtral's."""

    def __init__(self, width=16, num=8, top_k=2):
        super().__init__()
        self.router, self.experts = TopRouter(width, num, top_k), StackedExperts(width, num)
        self.shared_expert_gate = nn.Linear(width, 1)

    def forward(self, x):
        _, scores, chosen = self.router(x)
        return self.experts(x, chosen, scores) + self.shared_expert_gate(x).sigmoid() * x


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
