"""Gradients to clip, and the same call made of torch's function and of ours on copies of them."""

import math
import warnings

import torch

import fastguard

# Shapes whose last blocks are not full, an empty tensor, and a 0-dim one.
SHAPES = [(10, 10), (1,), (33, 7), (), (0,), (1027,)]

# Relative error of torch's own norm in each dtype (its result is rounded to that dtype); ours is better.
NORM_RTOL = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Of the clipped gradients: one rounding of the product, and the coefficient's own error.
GRAD_RTOL = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def make_gradients(shapes=SHAPES, dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return [(scale * torch.randn(s, generator=generator, dtype=wide)).to(dtype) for s in shapes]


def as_parameters(gradients):
    parameters = []
    for gradient in gradients:
        if gradient is None:
            parameters.append(torch.nn.Parameter(torch.zeros(3)))
            continue
        p = torch.nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
        p.grad = gradient
        parameters.append(p)
    return parameters


def copied(gradients):
    """Copies with the strides of the originals."""
    return [None if g is None else torch.empty_strided(g.shape, g.stride(), dtype=g.dtype).copy_(g) for g in gradients]


def outcome(function, *args, **kwargs):
    """What a call gives: its result, or the type and message of its error, with the warnings that it made."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            result = (type(error), str(error))
    return result, [(w.category, str(w.message)) for w in caught]


def assert_as_torch(gradients, max_norm, *args, rtol=None, **kwargs):
    """Clips copies with torch and with fastguard: same norm, dtype, device, gradients, errors and warnings."""
    theirs, ours = as_parameters(copied(gradients)), as_parameters(copied(gradients))
    expected, expected_warnings = outcome(torch.nn.utils.clip_grad_norm_, theirs, max_norm, *args, **kwargs)
    got, got_warnings = outcome(fastguard.clip_grad_norm_, ours, max_norm, *args, **kwargs)
    assert got_warnings == expected_warnings
    compare(got, expected, rtol)
    for a, b in zip(ours, theirs, strict=True):
        if b.grad is None:
            assert a.grad is None
            continue
        real = b.grad.dtype.to_real() if b.grad.is_complex() else b.grad.dtype
        tolerance = rtol if rtol is not None else GRAD_RTOL[real]
        # absolute, too: a subnormal float16 has few digits
        atol = {torch.float16: 1e-7}.get(real, 0.0)
        torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=atol, equal_nan=True)
    return got


def compare(got, expected, rtol=None):
    if not isinstance(expected, torch.Tensor):
        assert got == expected
        return
    assert isinstance(got, torch.Tensor), got
    assert (got.dtype, got.shape, got.device) == (expected.dtype, expected.shape, expected.device)
    assert not got.requires_grad and got.grad_fn is None
    tolerance = rtol if rtol is not None else NORM_RTOL[expected.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=0.0, equal_nan=True)


def true_norm(tensors):
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    return math.sqrt(math.fsum(float(p.double().square().sum()) for p in parts))
