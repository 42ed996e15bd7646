"""Small models, deterministic steps, and bit-for-bit comparison: what the guard's tests are made of."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastguard
from fastguard.kernels import cpu

needs_extension = pytest.mark.skipif(cpu.extension is None, reason="the extension is not built")


class Embedded(nn.Module):
    """An embedding with sparse gradients, for SparseAdam."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4, sparse=True)

    def forward(self, x):
        rows = (x.abs() * 3).long().clamp(max=6)[:, :3]  # repeats rows: the gradients are not coalesced
        return self.table(rows).sum(1)


class Convolution(nn.Module):
    """Parameters whose gradients may lie otherwise in memory than they do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3, dtype=torch.float64).contiguous())
        self.square = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))

    def set_gradients(self, step, otherwise=True, bad=False):
        generator = torch.Generator().manual_seed(step)
        weight, square = (torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in self.parameters())
        if bad:
            weight[0, 0, 0, 0] = math.nan
        self.weight.grad = weight.to(memory_format=torch.channels_last) if otherwise else weight
        self.square.grad = square.t().contiguous().t() if otherwise else square


class Allocations(TorchDispatchMode):
    """Notes how many bytes the operations of torch allocate, and the largest tensor that is made."""

    num_bytes = largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in known:
                self.num_bytes += x.untyped_storage().nbytes()
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return made


def make_model(kind="mlp", dtype=torch.float32, seed=0):
    """A model of 6 inputs: "mlp", "matrices" (no biases) or "embedding"."""
    torch.manual_seed(seed)
    if kind == "embedding":
        return Embedded().to(dtype)
    bias = kind == "mlp"
    return nn.Sequential(nn.Linear(6, 8, bias=bias), nn.Tanh(), nn.Linear(8, 4, bias=bias)).to(dtype)


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def adamw(params, **settings):
    return torch.optim.AdamW(params, lr=0.05, **settings)


def guarded_model(make=_sgd, kind="mlp", dtype=torch.float32, **settings):
    """A model, and an optimizer of its parameters under a guard."""
    model = make_model(kind, dtype)
    return model, fastguard.wrap(make(model.parameters()), model, **settings)


def twins(make, kind="mlp", dtype=torch.float32, **settings):
    """A model with its optimizer, and the same once more under a guard."""
    plain = make_model(kind, dtype)
    return plain, make(plain.parameters()), *guarded_model(make, kind, dtype, **settings)


def notes_of(optimizer):
    optimizer.guard.report()
    return optimizer.guard.history.model


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(*shape, num=5, seed=1):
    return torch.randint(num, shape, generator=torch.Generator().manual_seed(seed))


def loss_at(model, step):
    """The loss on the batch of `step`, which depends on nothing else."""
    generator = torch.Generator().manual_seed(1000 + step)
    dtype = next(model.parameters()).dtype
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randn(5, 4, generator=generator, dtype=torch.float64).to(dtype)
    return (model(x) - y).square().mean()


def poison(model, value=float("nan"), index=0):
    """Puts `value` into one element of the gradient of parameter `index`."""
    gradient = list(model.parameters())[index].grad
    assert gradient is not None
    values = gradient._values() if gradient.is_sparse else gradient
    values.view(-1)[values.numel() // 2] = value


def take_step(model, optimizer, step, *, closure=False, bad=None, bad_index=0, before_step=None):
    """One training step on the batch of `step`; `bad` is put into its gradients, `before_step` runs ahead of `step`."""

    def evaluate():
        optimizer.zero_grad()
        loss = loss_at(model, step)
        loss.backward()
        if bad is not None:
            poison(model, bad, bad_index)
        if before_step is not None:
            before_step()
        return loss.detach()

    if closure:
        return optimizer.step(evaluate)
    evaluate()
    return optimizer.step()


def train(model, optimizer, steps, **settings):
    for step in steps:
        take_step(model, optimizer, step, **settings)


def snapshot(model, *optimizers):
    """A copy of all parameters, of all optimizer state and of all groups, down to the last bit."""
    return {
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
        "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers],
    }


def gradients(model):
    return [p.grad for p in model.parameters()]


def _bits(tensor):
    if tensor.is_sparse:
        return _bits(tensor._indices()) + _bits(tensor._values())
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_identical(got, expected, at="", close=None):
    """Same types, same keys, same dtypes and shapes, same bits (so that NaN equals NaN); with `close`, floating-point
    numbers may differ by these relative and absolute tolerances."""
    assert type(got) is type(expected), f"{at}: {type(got)} is not {type(expected)}"
    if isinstance(expected, torch.Tensor) and expected.is_floating_point() and close is not None:
        torch.testing.assert_close(got, expected, rtol=close[0], atol=close[1], msg=lambda m: f"{at}: {m}")
    elif isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape, got.layout) == (expected.dtype, expected.shape, expected.layout), at
        assert _bits(got) == _bits(expected), f"{at}: {got} is not {expected}"
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys(), f"{at}: {list(got)} are not {list(expected)}"
        for key in expected:
            assert_identical(got[key], expected[key], f"{at}[{key!r}]", close)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), at
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert_identical(a, b, f"{at}[{i}]", close)
    elif isinstance(expected, float) and close is not None:
        assert abs(got - expected) <= close[1] + close[0] * abs(expected) or got == expected, f"{at}: {got}, {expected}"
    else:
        assert got == expected or (got != got and expected != expected), f"{at}: {got!r} is not {expected!r}"


def is_identical(got, expected):
    """As `assert_identical`, as an answer."""
    try:
        assert_identical(got, expected)
    except AssertionError:
        return False
    return True


def assert_close(got, expected, rtol, atol):
    """As `assert_identical`, but floating-point numbers may differ by the tolerances."""
    assert_identical(got, expected, close=(rtol, atol))


def true_norm(tensors):
    """The 2-norm of all of them, by float64 arithmetic."""
    values = [t.coalesce().values() if t.is_sparse else t for t in tensors if t is not None]
    return float(torch.cat([v.detach().double().reshape(-1) for v in values]).norm()) if values else 0.0


def clip_by_torch(model, max_norm):
    """What `torch.nn.utils.clip_grad_norm_` does, also for sparse gradients, which it does not take. Gives the norm."""
    if not any(g is not None and g.is_sparse for g in gradients(model)):
        return float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
    norm = true_norm(gradients(model))
    for g in gradients(model):
        if g is not None:
            g.mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm
