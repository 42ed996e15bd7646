"""Copies of many tensors in one call: bit for bit what torch copies, and nothing beside."""

from __future__ import annotations

import pytest
import torch

from fastguard.kernels import cpu, run_copy
from fastguard.kernels.registry import BACKENDS

has_kernels = BACKENDS["cpu"].unavailable() is None
SIZES = (0, 1, 3, 2047, 2048, 2049, 65_536, 262_144 + 5, 1_000_003)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_and_no_other(dtype: torch.dtype) -> None:
    source, to, around = [], [], []
    for size in SIZES:
        whole = torch.full((size + 40,), 7.0, dtype=dtype)
        source.append(torch.randn(size + 1).to(dtype)[1:])  # at an odd address
        to.append(whole[17 : 17 + size])
        around.append(whole)
    source[4][:2] = torch.tensor([float("nan"), float("-inf")])
    run_copy(to, source)
    for got, want, whole in zip(to, source, around, strict=True):
        assert torch.equal(got.view(torch.uint8), want.contiguous().view(torch.uint8))
        assert (whole[:17] == 7.0).all() and (whole[17 + len(got) :] == 7.0).all()


def test_what_does_not_lie_alike_goes_through_torch() -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 3, 8, 8)
    source = [image, image.to(memory_format=torch.channels_last), torch.arange(5), torch.randn(4, dtype=torch.cfloat)]
    source += [torch._neg_view(torch.randn(6)), torch.randn(3, 5).t(), torch.ones(4, dtype=torch.bool)]
    to = [torch.empty_like(x) for x in source]
    source.append(torch.ones(3).half())
    to[4], to[5] = torch.empty(6), torch.empty(5, 3)
    to.append(torch.empty(3))  # of another dtype
    if has_kernels:
        assert cpu.extension.copy(to, source, 1) == [1, 2, 3, 4, 5, 6, 7]
    run_copy(to, source)
    for got, want in zip(to, source, strict=True):
        assert torch.equal(got, want.to(got.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])  # the latter through torch
def test_parameters_are_written_without_a_word_to_autograd(dtype: torch.dtype) -> None:
    to = torch.nn.Parameter(torch.zeros(5, dtype=dtype), requires_grad=dtype.is_floating_point)
    version, values = to._version, torch.arange(5).to(dtype).requires_grad_(dtype.is_floating_point)
    with torch.no_grad():
        run_copy([to], [values])
    assert torch.equal(to.detach(), values.detach()) and to._version == version and to.is_leaf


@pytest.mark.skipif(not has_kernels, reason="no C++ kernels")
def test_memory_that_was_given_up_is_not_read() -> None:
    gone = torch.randn(64)
    gone.untyped_storage().resize_(0)
    assert cpu.extension.copy([torch.zeros(64)], [gone], 1) == [0]
