"""What only the GPU kernels for activations promise, and the trial that "auto" makes of all of them on a device."""

import math
import re

import numpy as np
import pytest
import torch
from activation_truth import assert_stats, expected, expected_table

from fastguard import ActivationStats
from fastguard.kernels import registry, triton
from fastguard.kernels.registry import BACKENDS, choose
from fastguard.kernels.slots import DEFAULT_OPTIONS
from fastguard.kernels.triton import TritonBackend, Workspace, launch
from fastguard.records.columns import INDEX
from fastguard.records.samples import EMPTY_ACTIVATION_ROW

import tolerances
from cases import DTYPES

LIMITS = (-0.99, 0.99, 1e-6)
REFERENCE = BACKENDS["reference"]

pytestmark = pytest.mark.usefixtures("device")


def test_a_program_s_counts_have_room():
    """What lang/activations.py relies on."""
    cpu = torch.device("cpu")
    for dtype in DTYPES:
        for shape in ((100, 7, 33), (3, 1000, 65), (9, 5, 400), (1, 2, 10**6), (7, 12345), (10**6, 3)):
            strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
            for dim in (None, 0, 1):
                made = launch.divide(shape, tuple(strides), dtype, dim, cpu)
                _, width, rows, columns = made.sizes
                constants = made.launcher.constants
                columns = min(width, columns)
                assert rows * columns < 2**20
                tiles_down = -(-rows // constants["ROWS"]) if constants["BY_COLUMN"] else 1
                assert tiles_down * -(-columns // constants["COLS"]) < 2**10


def test_figures_land_in_their_place_and_nowhere_else(device):
    rows = torch.full((3, 10), math.nan, dtype=torch.float64)
    table = torch.full((7, 4), math.nan, dtype=torch.float64)
    tensor = torch.randn(40, 5)
    TritonBackend().activation_into(tensor, None, LIMITS, rows[1], None)
    assert_stats(ActivationStats.from_row(rows[1].tolist()), expected(tensor))
    assert rows[0].isnan().all() and rows[2].isnan().all()
    TritonBackend().activation_into(tensor, 1, LIMITS, rows[0], table[1:6])
    assert rows[0].tolist() == pytest.approx(rows[1].tolist(), rel=1e-6)
    np.testing.assert_allclose(table[1:6].cpu().numpy(), expected_table(tensor, 1), rtol=1e-6)
    assert table[0].isnan().all() and table[6].isnan().all()
    TritonBackend().activation_into(torch.zeros(0), None, LIMITS, rows[2], None)
    assert tuple(rows[2].tolist()) == EMPTY_ACTIVATION_ROW
    TritonBackend().activation_into(torch.zeros(0, 5), 1, LIMITS, rows[2], table[2:])
    assert tuple(rows[2].tolist()) == EMPTY_ACTIVATION_ROW and not table[2:].any()


def test_in_a_steady_state_nothing_is_allocated_and_nothing_waits(device, monkeypatch):
    workspace = Workspace(device)
    large, small = torch.randn(60, 70), torch.randn(3, 4, 5)
    row, table = torch.empty(10, dtype=torch.float64), torch.empty(70, 4, dtype=torch.float64)
    workspace.measure_activation(large, 1, LIMITS, row, table)

    def refuse(*arguments, **options):
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


def test_the_same_bits_each_time_and_for_the_same_memory():
    tensor = torch.randn(6, 5, 9, 8)
    tensor[1, 2, 3, 4] = math.nan
    found = TritonBackend().activation(tensor, 1, LIMITS)
    assert TritonBackend().activation(tensor, 1, LIMITS) == found
    assert TritonBackend().activation(tensor.permute(3, 1, 0, 2), 1, LIMITS) == found
    turned = TritonBackend().activation(tensor.permute(3, 1, 0, 2), None, LIMITS)
    assert turned == TritonBackend().activation(tensor, None, LIMITS)


@pytest.mark.parametrize("backend", ["triton", "reference", "cpu"])
def test_figures_stay_on_the_device_whatever_the_backend(backend, device):
    if backend == "cpu" and device.type != "cpu":
        pytest.skip("the C++ kernels read CPU tensors only")
    x = torch.randn(12, 5, 4)
    row, table = torch.full((10,), math.nan, dtype=torch.float64), torch.full((5, 4), math.nan, dtype=torch.float64)
    chosen = choose(x.device, backend, "activation_into")
    chosen.activation_into(x, None, LIMITS, row, None)
    assert_stats(ActivationStats.from_row(row.tolist()), expected(x))
    row.fill_(math.nan)
    chosen.activation_into(x, 1, LIMITS, row, table)
    assert_stats(ActivationStats.from_row(row.tolist()), expected(x))
    np.testing.assert_allclose(table.cpu().numpy(), expected_table(x, 1), rtol=tolerances.SUM_ABS)


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def anew(workspace):
    triton._verdicts.clear()
    yield
    triton._verdicts.clear()


@pytest.mark.parametrize("operation", ["tensor_stats", pytest.param("activation", marks=pytest.mark.slow)])
def test_right_kernels_pass(operation):
    assert TritonBackend().problem_on(DEVICE, operation) is None


def _wrong(column):
    def measure(self, plan, slot, *arguments, **others):
        MEASURE(self, plan, slot, *arguments, **others)
        slot.rows[3, INDEX[column]] = slot.rows[3, INDEX[column]] * (1 + 2e-6) + (column == "num_nans")

    return measure


def _never_skips(self, plan, slot, options=DEFAULT_OPTIONS, **others):
    MEASURE(self, plan, slot, options._replace(skip_nonfinite=False), **others)


def _raises(*arguments, **others):
    raise RuntimeError("PTX was compiled with an unsupported toolchain\nmore")


MEASURE = Workspace.measure
FAULTS = [
    ("measure", _wrong("sum_sq"), "wrong statistics: sum_sq of tensor 3 is"),
    ("measure", _wrong("abs_max"), "wrong statistics: abs_max of tensor 3 is"),
    ("measure", _wrong("num_nans"), "wrong statistics: num_nans of tensor 3 is"),
    ("measure", _never_skips, "did not see NaN and Inf"),
    ("measure", _raises, "raised RuntimeError: PTX was compiled with an unsupported toolchain$"),
    ("scale", lambda *arguments, **others: None, "scaled torch.float32 wrongly"),
]


@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize(("method", "fault", "message"), FAULTS, ids=[message for *_, message in FAULTS])
def test_what_is_wrong_is_caught_and_said(method, fault, message, monkeypatch):
    monkeypatch.setattr(Workspace, method, fault)
    assert re.match(rf"a trial on {DEVICE} (gave )?{message}", str(TritonBackend().problem_on(DEVICE, "tensor_stats")))


@pytest.mark.long_interpreted
def test_a_full_device_is_tried_again(monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("tried to allocate 20 MiB")

    with monkeypatch.context() as full:
        full.setattr(Workspace, "measure", fail)
        assert "OutOfMemoryError" in str(TritonBackend().problem_on(DEVICE, "tensor_stats"))
    assert TritonBackend().problem_on(DEVICE, "tensor_stats") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x, dim, limits: ((0.0,) * 10, None), "float32 .*: numel is 0.0 where torch says 9001.0"),
        (
            lambda x, dim, limits: REFERENCE.activation(x, dim, limits) if dim is None else ((0.0,) * 10, bytes(4480)),
            "num_near_zero of channel 0 is 0.0 where torch says",
        ),
    ],
)
def test_wrong_activations_leave_statistics_to_triton(monkeypatch, caplog, result, message):
    monkeypatch.setattr(TritonBackend, "activation", lambda self, *arguments: result(*arguments))
    monkeypatch.setattr(BACKENDS["cpu"], "accepts", lambda device: False)
    registry.say_once.cache_clear()
    with caplog.at_level("WARNING", "fastguard"):
        for _ in range(2):
            assert registry.choose(DEVICE, "auto", "activation") is BACKENDS["reference"]
            assert registry.choose(DEVICE, "auto", "tensor_stats") is BACKENDS["triton"]
    (said,) = caplog.records
    assert re.search(message, said.getMessage())
    assert registry.choose(DEVICE, "triton", "activation") is BACKENDS["triton"]  # by name: as asked
