"""Small models on a GPU, their steps, and what is left of a training."""

from collections.abc import Callable

import torch
from torch import nn

Step = Callable[[int], None]

FUSED = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.05, amsgrad=True, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05, fused=True),
}
OTHERS = {
    "SGD-foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "AdamW-foreach": lambda params: torch.optim.AdamW(params, lr=0.05, foreach=True),
}


def make_model(device, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(67, 129), nn.Tanh(), nn.Linear(129, 33)).to(device, dtype)


def batches(device, num_steps, dtype=torch.float32):
    """Inputs, made before anything is watched."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 67, generator=generator).to(device, dtype) for _ in range(num_steps)]


def backward(model, x, bad=None, scaler=None):
    """Gradients of the loss on `x`; `bad` is written into one of them without a sync."""
    model.zero_grad(set_to_none=True)
    loss = model(x).float().square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
    if bad is not None:
        gradient = next(model.parameters()).grad
        assert gradient is not None
        gradient.view(-1)[5].fill_(bad)
    return loss


def snapshot(model, optimizer):
    """Copies of all parameters and of all tensors of the state, on the CPU."""
    state = [v for p in model.parameters() for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
    return [t.detach().cpu().clone() for t in [*model.parameters(), *state]]


def same_bits(a, b):
    def raw(t):
        return t.contiguous().reshape(-1).view(torch.uint8)

    return len(a) == len(b) and all(torch.equal(raw(x), raw(y)) for x, y in zip(a, b))
