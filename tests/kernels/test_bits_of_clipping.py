"""The drop-in's gradients are torch's to the bit wherever its norm, the accurate one, rounds to torch's."""

from __future__ import annotations

import pytest
import torch

import fastguard


def clip(function, gradients: list[torch.Tensor], max_norm: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return function(parameters, max_norm), [p.grad for p in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_clipped_gradients_are_torch_s(dtype: torch.dtype) -> None:
    num_same_norms = 0
    for case in range(60):
        sizes = torch.randint(1, 3000, (1 + case % 5,)).tolist()
        gradients = [torch.randn(size, dtype=dtype) * 10.0 ** (case % 7 - 3) for size in sizes]
        max_norm = 1e-3 * (1 + case)
        norm, clipped = clip(torch.nn.utils.clip_grad_norm_, gradients, max_norm)
        own_norm, own = clip(fastguard.clip_grad_norm_, gradients, max_norm)
        if not torch.equal(norm, own_norm):
            continue
        num_same_norms += 1
        for wanted, got in zip(clipped, own, strict=True):
            assert torch.equal(wanted, got), (case, norm, max_norm)
    assert num_same_norms >= 15
