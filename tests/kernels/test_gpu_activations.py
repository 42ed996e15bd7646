"""What only the GPU kernels for activations promise. The figures that they give are tested in test_activations.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from activation_truth import assert_stats, expected, expected_table

from fastguard import ActivationStats
from fastguard.kernels.registry import choose_or_fall_back
from fastguard.kernels.triton import activations
from fastguard.kernels.triton.activations import ActivationWorkspace
from fastguard.records.samples import EMPTY_ACTIVATION_ROW

import tolerances
from cases import DTYPES

LIMITS = (-0.99, 0.99, 1e-6)

pytestmark = pytest.mark.usefixtures("device")


def test_a_program_s_counts_have_room() -> None:
    """What lang/activations.py relies on."""
    cpu = torch.device("cpu")
    for dtype in DTYPES:
        for shape in ((100, 7, 33), (3, 1000, 65), (9, 5, 400), (1, 2, 10**6), (7, 12345), (10**6, 3)):
            strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
            for dim in (None, 0, 1):
                made = activations.divide(shape, tuple(strides), dtype, dim, cpu)
                _, width, rows, columns = made.sizes
                constants = made.launcher.constants
                columns = min(width, columns)
                assert rows * columns < 2**20
                tiles_down = -(-rows // constants["ROWS"]) if constants["BY_COLUMN"] else 1
                assert tiles_down * -(-columns // constants["COLS"]) < 2**10


def test_figures_land_in_their_place_and_nowhere_else(device: torch.device) -> None:
    rows = torch.full((3, 10), math.nan, dtype=torch.float64)
    table = torch.full((7, 4), math.nan, dtype=torch.float64)
    tensor = torch.randn(40, 5)
    activations.activation_into(tensor, None, LIMITS, rows[1], None)
    assert_stats(ActivationStats.from_row(rows[1].tolist()), expected(tensor))
    assert rows[0].isnan().all() and rows[2].isnan().all()
    activations.activation_into(tensor, 1, LIMITS, rows[0], table[1:6])
    assert rows[0].tolist() == pytest.approx(rows[1].tolist(), rel=1e-6)
    np.testing.assert_allclose(table[1:6].cpu().numpy(), expected_table(tensor, 1), rtol=1e-6)
    assert table[0].isnan().all() and table[6].isnan().all()
    activations.activation_into(torch.zeros(0), None, LIMITS, rows[2], None)
    assert tuple(rows[2].tolist()) == EMPTY_ACTIVATION_ROW
    activations.activation_into(torch.zeros(0, 5), 1, LIMITS, rows[2], table[2:])
    assert tuple(rows[2].tolist()) == EMPTY_ACTIVATION_ROW and not table[2:].any()


def test_in_a_steady_state_nothing_is_allocated_and_nothing_waits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = ActivationWorkspace(device)
    large, small = torch.randn(60, 70), torch.randn(3, 4, 5)
    row, table = torch.empty(10, dtype=torch.float64), torch.empty(70, 4, dtype=torch.float64)
    workspace.measure_activation(large, 1, LIMITS, row, table)

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("allocates or synchronises")

    for name in ("empty", "zeros", "full", "tensor"):
        monkeypatch.setattr(torch, name, refuse)
    for name in ("item", "tolist", "cpu", "contiguous"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    workspace.measure_activation(large, 1, LIMITS, row, table)
    workspace.measure_activation(small, None, LIMITS, row)
    workspace.measure_activation(small, 1, LIMITS, row, table[:4])
    monkeypatch.undo()
    np.testing.assert_allclose(table[:4].cpu().numpy(), expected_table(small, 1), rtol=1e-6)


def test_the_same_bits_each_time_and_for_the_same_memory() -> None:
    tensor = torch.randn(6, 5, 9, 8)
    tensor[1, 2, 3, 4] = math.nan
    found = activations.activation(tensor, 1, LIMITS)
    assert activations.activation(tensor, 1, LIMITS) == found
    assert activations.activation(tensor.permute(3, 1, 0, 2), 1, LIMITS) == found
    turned = activations.activation(tensor.permute(3, 1, 0, 2), None, LIMITS)
    assert turned == activations.activation(tensor, None, LIMITS)


@pytest.mark.parametrize("backend", ["triton", "reference", "cpu"])
def test_figures_stay_on_the_device_whatever_the_backend(backend: str, device: torch.device) -> None:
    if backend == "cpu" and device.type != "cpu":
        pytest.skip("the C++ kernels read CPU tensors only")
    x = torch.randn(12, 5, 4)
    row, table = torch.full((10,), math.nan, dtype=torch.float64), torch.full((5, 4), math.nan, dtype=torch.float64)
    chosen = choose_or_fall_back(x.device, backend, "activation_into")
    chosen.activation_into(x, None, LIMITS, row, None)
    assert_stats(ActivationStats.from_row(row.tolist()), expected(x))
    row.fill_(math.nan)
    chosen.activation_into(x, 1, LIMITS, row, table)
    assert_stats(ActivationStats.from_row(row.tolist()), expected(x))
    np.testing.assert_allclose(table.cpu().numpy(), expected_table(x, 1), rtol=tolerances.SUM_ABS)
