"""What only the C++ backend promises: determinism, access to tensors, threads, the GIL, errors of Python's kinds."""

import gc
import math
import os
import subprocess
import sys

import pytest
import torch

from fastguard import UnsupportedTensorError, kernels
from fastguard.kernels import cpu, plain_stats
from fastguard.kernels.registry import BACKENDS
from fastguard.records import TensorStats, fold_rows

from cases import DTYPES, LAYOUTS, NASTY, image, nasty

CPU = BACKENDS["cpu"]
pytestmark = pytest.mark.skipif(CPU.unavailable() is not None, reason=f"no C++ kernels: {CPU.unavailable()}")
LIMITS = (-0.99, 0.99, 1e-6)


def varied():
    tensors = [torch.randn(n).to(dtype) for dtype in DTYPES for n in (1, 100, 4097, 140_001)]
    tensors += [nasty(value, dtype, 9000).view(9, 1000) for dtype in DTYPES for value in NASTY.values()]
    tensors += [layout(image(dtype)) for dtype in DTYPES for layout in LAYOUTS.values()]
    tensors += [torch.full((9001,), value).to(dtype) for dtype in DTYPES for value in (math.nan, math.inf)]
    tensors += [torch.randn(600_003) * 1e-3 + 1e-3, torch.rand(200_001).bfloat16() + 20, torch.full((99_999,), 0.1)]
    tensors += [torch.randn(1300, 1030) + 7, torch.randn(20, 70_001), torch.randn(8, 40, 50, 60)]
    return tensors


def everything(tensors):
    """All figures of all operations."""
    table, total = CPU.tensor_stats(tensors)
    found = [bytes(table), total]
    for x in tensors:
        found.append(CPU.activation(x, None, LIMITS)[0])
        found += [CPU.activation(x, dim, LIMITS) for dim in {0, max(0, x.dim() - 1)}]
    return tuple(found)


def test_bit_identical_across_thread_counts_and_instruction_sets(isa, threads):
    tensors = varied()
    seen = set()
    for name in isa.isa_names():
        isa.select_isa(name)
        for n in (1, 2, 7) if name == isa.isa_names()[0] else (3,):
            threads(n)
            seen.add(everything(tensors))
    assert len(seen) == 1


def test_scaling_is_bit_identical_across_instruction_sets(isa, threads):
    for factor in (0.3, -1e-6, 7.0):
        results = []
        for name in isa.isa_names():
            isa.select_isa(name)
            torch.manual_seed(20240)
            tensors = [torch.randn(70_000).mul_(10.0 ** -(i % 12)).to(dtype) for i, dtype in enumerate(DTYPES * 3)]
            CPU.scale_(tensors, factor)
            results.append(b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors))
        assert all(r == results[0] for r in results)


def test_a_row_does_not_depend_on_what_else_is_in_the_list():
    tensors = varied()
    together = CPU.tensor_stats(tensors)[0]
    alone = b"".join(bytes(CPU.tensor_stats([t])[0]) for t in tensors)
    assert bytes(together) == alone


def test_the_fold_of_the_rows_has_the_same_bits_in_python():
    table, total = CPU.tensor_stats(varied())
    assert fold_rows(TensorStats(table)) == total


@pytest.mark.slow
def test_both_ways_to_read_a_tensor_agree():
    """The exchange API and the Python calls that stand in for it where torch has none."""
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no exchange API")
    script = (
        "import torch, sys\n"
        "from fastguard.kernels.registry import BACKENDS\n"
        "cpu = BACKENDS['cpu']\n"
        "torch.manual_seed(3)\n"
        "x = torch.randn(6, 7, 8, 9)\n"
        "z = torch.randn(50, dtype=torch.complex64)\n"
        "ts = [x, x[::2], x.permute(3, 1, 0, 2)[1:], x.to(memory_format=torch.channels_last), x.half(), x.bfloat16(),\n"
        "      x.double()[..., ::3], z, z.conj(), z.conj().imag, z[::2], torch.zeros(0), torch.tensor(2.0),\n"
        "      torch.nn.Parameter(x), x.to_sparse(), torch.randn(1, dtype=torch.complex64).conj().imag]\n"
        "print(cpu.detail().count('Python calls'), bytes(cpu.tensor_stats(ts)[0]).hex())\n"
        "w = torch.randn(50, 3, dtype=torch.complex64)\n"
        "real = [t for t in (*ts, w.conj().imag) if t.layout == torch.strided and not t.is_complex()]\n"
        "print([cpu.activation(t, None, (-1.0, 1.0, 0.1))[0] for t in real])\n"
        "print([cpu.activation(t, max(0, t.dim() - 1), (-1.0, 1.0, 0.1)) for t in real])\n"
        "cpu.scale_(ts[:1], 0.5)\n"
        "print(bytes(cpu.tensor_stats(ts)[0]).hex())\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "FASTGUARD_DLPACK": dlpack},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for dlpack in ("1", "0")
    ]
    assert (outputs[0][0], outputs[1][0]) == ("0", "1")
    assert outputs[0][1:] == outputs[1][1:]


@pytest.mark.slow
def test_the_instruction_set_can_be_chosen_by_the_environment():
    script = "import fastguard; fastguard.backends(); from fastguard.kernels import cpu; print(cpu._C.isa())"
    for name in (*cpu._C.isa_names(), "sse9"):
        environment = {**os.environ, "FASTGUARD_ISA": name}
        ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert ran.stdout.strip() == ("" if name == "sse9" else name)
    assert ran.returncode != 0 and "FASTGUARD_ISA: instruction set must be one of [" in ran.stderr


def test_flushing_subnormals_changes_nothing(threads):
    threads(2)  # each has its own setting
    tensors = [
        torch.full((9000,), 1e-40),
        torch.full((1000, 2000), 1e-41),
        torch.rand(30, 300, dtype=torch.float64) * 1e-310,
        torch.full((9000,), 3e-7, dtype=torch.float16),
    ]
    before = everything(tensors)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        during = everything(tensors)
        still_flushing = float(torch.tensor([1e-40]) * 1.0) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert during == before
    assert CPU.tensor_stats(tensors)[1][5] == 0  # nothing was counted as zero
    assert still_flushing  # the user's own setting is back after the pass


@pytest.mark.parametrize(
    "call", [CPU.tensor_stats, lambda xs: CPU.activation(xs[0], None, LIMITS)], ids=["list", "one"]
)
def test_the_gil_is_released_for_a_large_pass(threads, ticks_during, call):
    threads(2)
    tensors = [torch.zeros(8000, 5000)]
    assert ticks_during(lambda: call(tensors)) > 0


@pytest.mark.slow
def test_after_a_fork_the_kernels_still_run():
    """In a forked child an OpenMP pool of the parent is gone; small work must not touch it."""
    script = (
        "import os, sys, torch\n"
        "from fastguard.kernels.registry import BACKENDS\n"
        "cpu = BACKENDS['cpu']\n"
        "torch.set_num_threads(2)\n"
        "cpu.tensor_stats([torch.ones(4_000_000)])\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    ok = cpu.tensor_stats([torch.ones(1000)])[1][1] == 1000.0\n"
        "    row, table = cpu.activation(torch.ones(100, 20), 1, (-1.0, 1.0, 1e-9))\n"
        "    os._exit(0 if ok and row[1] == 1.0 and len(table) == 640 else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_what_has_no_channels_or_is_not_real_is_refused():
    with pytest.raises(UnsupportedTensorError, match="must be dense to have channels"):
        CPU.activation(torch.eye(4).to_sparse(), 1, LIMITS)
    with pytest.raises(UnsupportedTensorError, match="must be real"):
        CPU.activation(torch.zeros(4, dtype=torch.complex64), None, LIMITS)


@pytest.mark.parametrize("names", [kernels.CPU_NAMES, frozenset()], ids=["extension", "python"])
def test_collect_gradients(names, monkeypatch):
    monkeypatch.setattr(kernels, "CPU_NAMES", names)
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(5)]
    for i in (0, 2, 4):
        params[i].grad = torch.full((2,), float(i))
    gradients, positions, fingerprint = kernels.collect_gradients([params[:3], params[3:]])
    assert [float(g[0]) for g in gradients] == [0.0, 2.0, 4.0]
    assert positions == [0, 2, 4]
    assert kernels.collect_gradients([params[:3], params[3:]])[2] == fingerprint
    assert kernels.collect_gradients([params[:2], params[2:]])[2] != fingerprint
    assert kernels.collect_gradients([params[::-1]])[2] != fingerprint
    gradients, positions, _ = kernels.collect_gradients([[params[0], params[2]]])
    assert positions is None
    assert len(gradients) == 2
    with pytest.raises(AttributeError):
        kernels.collect_gradients([[object()]])


def mixed_parameters():
    """More of them, and larger, than are measured as they are found; strided ones, empty ones, and some without."""
    shapes = [(3,), (0,), (64,), (4096,), (4097,), (70, 999), (1000,), (300_001,)] * 4 + [(4000,)] * 150
    parameters = []
    for i, shape in enumerate(shapes):
        parameter = torch.nn.Parameter(
            torch.zeros(shape, dtype=DTYPES[i % 4] if DTYPES[i % 4].is_floating_point else None)
        )
        if i % 7 != 6:
            parameter.grad = torch.randn(shape).to(parameter.dtype)
        parameters.append(parameter)
    strided = torch.nn.Parameter(torch.zeros(50, 30))
    strided.grad = torch.randn(100, 30)[::2]
    return [strided, *parameters]


@pytest.mark.parametrize("unscale", [1.0, 0.125])
def test_gradients_give_the_rows_of_a_list(threads, unscale):
    parameters = mixed_parameters()
    gradients = [p.grad for p in parameters if p.grad is not None]
    rows, total = CPU.tensor_stats(gradients, unscale)
    for n in (1, 2, 7):
        threads(n)
        table, fold, positions, _, bits = cpu.extension.gradient_stats(
            [parameters[:5], [], parameters[5:]], torch.get_num_threads(), unscale
        )
        assert (bytes(table), fold) == (bytes(rows), total)
        assert positions == [i for i, p in enumerate(parameters) if p.grad is not None]
        assert cpu.dtypes(bits) == {g.dtype for g in gradients}
        assert bytes(plain_stats(gradients, "cpu", unscale)[0]) == bytes(rows)


def test_clipping_in_one_call_is_what_two_calls_do(threads):
    results = []
    for n in (1, 2, 7):
        threads(n)
        torch.manual_seed(11)
        parameters = mixed_parameters()
        norm, bits, written = cpu.extension.clip_gradients(parameters, torch.get_num_threads(), 1.0, False)
        assert [id(g) for g in written] == [id(p.grad) for p in parameters if p.grad is not None]
        results.append((norm, bits, b"".join(g.contiguous().view(torch.uint8).numpy().tobytes() for g in written)))
    torch.manual_seed(11)
    gradients = [p.grad for p in mixed_parameters() if p.grad is not None]
    total, norm = CPU.tensor_stats(gradients)[1], results[0][0]
    assert math.sqrt(total[1]) == norm
    CPU.scale_(gradients, 1.0 / (norm + 1e-6))
    together = b"".join(g.contiguous().view(torch.uint8).numpy().tobytes() for g in gradients)
    assert all(result == (norm, results[0][1], together) for result in results)


def test_a_parameter_that_adds_others_on_being_asked_is_refused():
    """There is room for the rows of as many parameters as there were at first."""
    parameters = []

    class Prolific(torch.nn.Parameter):
        @property
        def grad(self):
            for _ in range(30):
                parameters.append(torch.nn.Parameter(torch.zeros(1)))
                parameters[-1].grad = torch.ones(1)
            return None

    parameters.append(Prolific(torch.zeros(2)))
    assert cpu.extension.gradient_stats([parameters], 1, 1.0) is None


class Unreadable:
    def __iter__(self):
        raise ZeroDivisionError("on iteration")


ERRORS = {
    "of Python": (ZeroDivisionError, "on iteration", lambda C: C.read_stream(Unreadable(), 1, False)),
    "of an attribute": (AttributeError, "grad", lambda C: C.collect_gradients([[5]])),
    "of a type within": (TypeError, "a list of parameters", lambda C: C.collect_gradients([()])),
    "of a value": (ValueError, "as many numbers", lambda C: C.dot(bytearray(8), bytearray(16))),
    "of an index": (IndexError, "^0$", lambda C: C.scale_([torch.ones(1).expand(3)], 2.0, 1)),
    "of a missing argument": (TypeError, "argument", lambda C: C.dot(bytearray(8))),
    "of a list": (TypeError, "argument", lambda C: C.collect_gradients(())),
    "of bytes": (TypeError, "argument", lambda C: C.dot(b"", bytearray())),
    "of a number": (TypeError, "argument", lambda C: C.sketch([], 1.5)),
    "of a text": (UnicodeEncodeError, "surrogates", lambda C: C.select_isa("\ud800")),
    "of a method": (TypeError, "argument", lambda C: C.ShardPlan().tensor_stats(5, 1)),
    "of a clip's list": (TypeError, "a list of parameters", lambda C: C.clip_gradients((), 1, 1.0, False)),
    "of a clip's norm": (TypeError, "real number", lambda C: C.clip_gradients([], 1, "1", False)),
    "of a clip's arguments": (TypeError, "takes 4 arguments", lambda C: C.clip_gradients([])),
}


@pytest.mark.parametrize("name", ERRORS)
def test_type_and_text(name):
    kind, text, call = ERRORS[name]
    with pytest.raises(kind, match=text) as caught:
        call(cpu._C)
    assert caught.type is kind


def test_errors_leak_no_reference():
    table = bytearray(8)
    tensors = [torch.ones(1).expand(3)]

    def fail():
        for call in (lambda: cpu._C.dot(table, bytearray(16)), lambda: cpu._C.scale_(tensors, 2.0, 1)):
            with pytest.raises((ValueError, IndexError)):
                call()

    fail()
    gc.collect()
    before = sys.getrefcount(table), sys.getrefcount(tensors), sys.getrefcount(tensors[0])
    for _ in range(20):
        fail()
    gc.collect()
    assert (sys.getrefcount(table), sys.getrefcount(tensors), sys.getrefcount(tensors[0])) == before
