"""Where our clipping is better than torch's on purpose, and what it does to memory and to autograd."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_rivals import as_parameters, copied, make_gradients, true_norm

import fastguard


def _versions(parameters: list[torch.nn.Parameter]) -> list[int]:
    return [p.grad._version for p in parameters]


# --- deviations, all documented ---


def test_float16_whose_norm_overflows() -> None:
    """torch's norm is Inf and its gradients are all 0; ours are what they should be."""
    gradients = [torch.full((1000,), 6e4, dtype=torch.float16)]
    theirs, ours = as_parameters(copied(gradients)), as_parameters(copied(gradients))
    assert torch.nn.utils.clip_grad_norm_(theirs, 100.0).isinf()
    assert not theirs[0].grad.any()

    norm = fastguard.clip_grad_norm_(ours, 100.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(true_norm(gradients), rel=1e-6)
    assert ours[0].grad.dtype == torch.float16
    expected = torch.full((1000,), 100.0 / math.sqrt(1000), dtype=torch.float64).half()
    torch.testing.assert_close(ours[0].grad, expected, rtol=1e-3, atol=0.0)


def test_the_coefficient_comes_from_the_accurate_norm() -> None:
    """torch puts its bfloat16 norm, 9.75 where 9.761 is true, into the coefficient; ours is rounded at the end only."""
    gradients = make_gradients([(95,)], torch.bfloat16)
    gradients[0].mul_(9.761 / true_norm(gradients))
    whole = copied(gradients)
    ours = as_parameters(gradients)
    norm = fastguard.clip_grad_norm_(ours, 1.0)
    assert norm.dtype == torch.bfloat16
    assert norm == torch.tensor(true_norm(whole), dtype=torch.bfloat16)
    expected = (whole[0].double() / (true_norm(whole) + 1e-6)).bfloat16()
    assert torch.equal(ours[0].grad, expected)


@pytest.mark.parametrize("value", [1.5e38, 1e-30, 1e-42])
def test_float32_at_its_ends(value: float) -> None:
    """The squares of these are no float32 any more; their norm is."""
    gradients = [torch.full((4,), value)]
    norm = fastguard.get_total_norm(gradients)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(true_norm(gradients), rel=1e-6)
    assert norm.item() > 0.0


def test_a_norm_beyond_float32_is_infinite_as_with_torch_but_clips() -> None:
    ours = as_parameters([torch.full((4,), 3e38)])
    assert fastguard.clip_grad_norm_(ours, 1.0).item() == math.inf
    torch.testing.assert_close(ours[0].grad, torch.full((4,), 0.5), rtol=1e-5, atol=0.0)


# --- memory and autograd ---


@pytest.mark.parametrize("norm_type", [2, 1, math.inf])
def test_clipping_bumps_versions(norm_type: float) -> None:
    parameters = as_parameters(make_gradients([(5, 5), (7,)]))
    before = _versions(parameters)
    fastguard.clip_grad_norm_(parameters, 0.01, norm_type)
    assert all(now > then for now, then in zip(_versions(parameters), before, strict=True))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_read_only_memory_will_do_where_nothing_is_clipped(tmp_path: Path) -> None:
    """The proof that nothing is written: a write to this memory would end the process."""
    values = make_gradients([(1000,)])[0]
    path = tmp_path / "gradients.bin"
    path.write_bytes(values.numpy().tobytes())
    parameters = as_parameters([torch.from_numpy(np.memmap(path, dtype=np.float32, mode="r"))])
    norm = fastguard.clip_grad_norm_(parameters, 1e6)
    assert norm.item() == pytest.approx(true_norm([values]), rel=1e-6)
    assert torch.equal(parameters[0].grad, values)


def test_a_coefficient_just_below_one_is_clipping() -> None:
    """norm == max_norm clips, by the 1e-6 of the formula, as with torch."""
    theirs, ours = (as_parameters([torch.tensor([3.0, 4.0])]) for _ in range(2))
    torch.nn.utils.clip_grad_norm_(theirs, 5.0)
    fastguard.clip_grad_norm_(ours, 5.0)
    torch.testing.assert_close(ours[0].grad, theirs[0].grad, rtol=1e-7, atol=0.0)
    assert ours[0].grad[1] < 4.0


@pytest.mark.parametrize("clips", [True, False])
def test_a_graph_through_clipped_gradients_fails_rather_than_go_on(clips: bool) -> None:
    x = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    x.grad = gradient
    penalty = gradient.square().sum()
    fastguard.clip_grad_norm_([x], 0.1 if clips else 1e6)
    if clips:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            penalty.backward()
    else:
        (second,) = torch.autograd.grad(penalty, x)
        torch.testing.assert_close(second, 36.0 * torch.tensor([8.0, 27.0]))


def test_gradients_that_require_grad_are_clipped_in_place() -> None:
    x = torch.nn.Parameter(torch.ones(2))
    x.grad = torch.tensor([3.0, 4.0], requires_grad=True)
    own = x.grad
    norm = fastguard.clip_grad_norm_([x], 1.0)
    assert not norm.requires_grad
    assert x.grad is own and own.requires_grad and own.is_leaf
    torch.testing.assert_close(own.detach(), torch.tensor([0.6, 0.8]), rtol=1e-6, atol=0.0)


def test_it_runs_in_several_threads_at_once() -> None:
    """The kernels let go of the GIL."""
    sets = [as_parameters(make_gradients([(300, 300)], seed=i)) for i in range(8)]
    expected = [true_norm([p.grad for p in parameters]) for parameters in sets]
    with ThreadPoolExecutor(4) as pool:
        norms = list(pool.map(lambda parameters: fastguard.clip_grad_norm_(parameters, 1.0).item(), sets))
    assert norms == pytest.approx(expected, rel=1e-6)
    assert [true_norm([p.grad for p in s]) for s in sets] == pytest.approx([1.0] * 8, rel=1e-5)
