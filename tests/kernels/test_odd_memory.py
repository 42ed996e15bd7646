"""Tensors whose address does not tell what they hold: negatives, freed storages, expanded beyond counting, sparse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fastguard import UnsupportedTensorError, activation_stats, tensor_stats
from fastguard.kernels import scale_

NEGATIVES: dict[str, Callable[[], torch.Tensor]] = {
    "0-dim": lambda: torch.tensor(1 + 2j).conj().imag,
    "one element": lambda: torch.randn(1, dtype=torch.complex64).conj().imag,
    "dense": lambda: torch._neg_view(torch.randn(500)),
    "as_strided": lambda: torch.randn(40, dtype=torch.complex64).conj().imag.as_strided((20,), (1,)),
    "transposed": lambda: torch._neg_view(torch.randn(20, 30)).t(),
    "complex": lambda: torch._neg_view(torch.randn(30, dtype=torch.complex128)),
    "float64": lambda: torch._neg_view(torch.rand(3000, dtype=torch.float64)),
    "half": lambda: torch._neg_view(torch.rand(300).half()),
}


@pytest.mark.thinned(interpreted=9)
@pytest.mark.parametrize("make", NEGATIVES.values(), ids=NEGATIVES)
def test_lazy_negatives_have_the_sign_that_torch_shows(backend: str, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    assert tensor.is_neg()
    row = tensor_stats([torch.ones(3), tensor], backend=backend)[1]
    resolved = tensor.resolve_neg()
    values = torch.view_as_real(resolved) if resolved.is_complex() else resolved
    assert row.sum == pytest.approx(float(values.double().sum()), rel=1e-5, abs=1e-5)
    assert row.sum != 0.0
    if not tensor.is_complex():
        stats = activation_stats(tensor, backend=backend)
        assert (stats.min_val, stats.max_val) == (float(values.min()), float(values.max()))
        scaled = 2 * values
        scale_([tensor], 2.0, backend=backend)
        assert torch.equal(tensor.resolve_neg(), scaled)


def test_float8_negatives(backend: str) -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        values = torch.randn(50).to(dtype)
        row = tensor_stats([torch._neg_view(values)], backend=backend)[0]
        assert row.sum == pytest.approx(-float(values.double().sum()), rel=1e-6)


def freed(
    offset: int, left_bytes: int = 0, shown_as: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
) -> torch.Tensor:
    flat = torch.randn(100_000)
    view = shown_as(flat[offset : offset + 60])
    flat.untyped_storage().resize_(left_bytes)
    return view


@pytest.mark.parametrize(("offset", "left"), [(0, 0), (6, 0), (90_000, 0), (0, 100), (6, 100), (90_000, 360_100)])
def test_a_storage_that_was_freed_or_cut_short_is_refused(backend: str, offset: int, left: int) -> None:
    good = torch.ones(3)
    message = "must hold data, got a tensor whose storage was freed or cut short"
    for call in (
        lambda x: tensor_stats([good, x], backend=backend),
        lambda x: scale_([good, x], 2.0, backend=backend),
        lambda x: activation_stats(x, backend=backend),
    ):
        with pytest.raises(UnsupportedTensorError, match=message):
            call(freed(offset, left))
    for shown_as in (lambda x: x.view(6, 10).t()[::2], lambda x: torch.view_as_complex(x.view(30, 2)), torch._neg_view):
        with pytest.raises(UnsupportedTensorError, match=message):
            tensor_stats([freed(offset, left, shown_as)], backend=backend)
    assert torch.equal(good, torch.ones(3))
    assert tensor_stats([freed(0, 240)], backend=backend)[0].numel == 60  # just enough


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(1).expand(2**53 + 1),
        lambda: torch.ones(1).expand(2**62),
        lambda: torch.ones(1, dtype=torch.complex64).expand(2**62),
        lambda: torch.ones(1, dtype=torch.complex64).expand(2**53),
        lambda: torch.ones(1, 1).expand(2**31, 2**31).unsqueeze(0),
    ],
)
def test_more_elements_than_can_be_counted_are_refused(backend: str, make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(UnsupportedTensorError, match=r"must have at most 2\^53 elements, got shape"):
        tensor_stats([make()], backend=backend)
    if not make().is_complex():
        with pytest.raises(UnsupportedTensorError, match="at most"):
            activation_stats(make(), backend=backend)
