"""Replicas that are no copies of each other are found, by tensor and rank; those that are, are left in peace."""

import math
from pathlib import Path

import pytest
import torch
from several_processes import run, slow

import fastguard
from fastguard import kernels
from fastguard.kernels import cpu
from fastguard.ranks.parity import checksum, checksums

SCRIPT = Path(__file__).with_name("parity_script.py")


def test_a_checksum_is_of_the_bits_in_any_order():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        x = torch.randn(37, 12, generator=generator).to(dtype)
        known = int(checksum(x))
        assert int(checksum(x.t().contiguous())) == int(checksum(x[torch.randperm(37)])) == known
        y = x.clone()
        view = torch.view_as_real(y) if y.is_complex() else y
        bits = view.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[view.element_size()])
        bits.view(-1)[17] ^= 1
        assert int(checksum(y)) != known
    assert int(checksum(torch.tensor([0.0]))) != int(checksum(torch.tensor([-0.0])))
    assert int(checksum(torch.empty(0))) == 0


def bits_of(count, dtype, generator):
    """Any bits at all, NaNs and subnormals among them."""
    size = dtype.to_real().itemsize if dtype.is_complex else dtype.itemsize
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    raw = raw.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    if dtype.is_complex:
        return torch.view_as_complex(raw.view(dtype.to_real()).view(-1, 2))
    return raw.view(dtype)


@pytest.fixture(params=[] if cpu.take_step is None else cpu._C.isa_names())
def isa(request):
    """Each instruction set in turn; none where the extension is not built."""
    used = cpu._C.isa()
    cpu._C.select_isa(request.param)
    yield
    cpu._C.select_isa(used)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_the_kernels_have_the_same_checksum_and_the_same_rows(dtype):
    generator = torch.Generator().manual_seed(0)
    for count in (0, 1, 15, 17, 255, 257, 4095, 4097, 65537):
        x, y = bits_of(count, dtype, generator), torch.randn(count, generator=generator).to(dtype)
        ones = bits_of(count, dtype, generator)
        torch.view_as_real(ones).fill_(-math.nan) if dtype.is_complex else ones.fill_(-math.nan)
        tensors = [x, y, x[::3], y[1:], x.expand(3, count), ones, y.view(count, 1).expand(count, 2).t(), x[:0]]
        found = kernels.stats_and_checksums(tensors)
        assert found is not None
        assert torch.frombuffer(found[2], dtype=torch.int64).tolist() == [int(checksum(t)) for t in tensors], count
        assert found[0] == kernels.run_stats(tensors, "cpu")[0], count


def test_checksums_of_what_is_no_plain_memory_are_those_of_torch():
    odd = [torch.randn(9).to_sparse(), torch.randn(9).to(torch.float8_e4m3fn), torch._neg_view(torch.randn(9))]
    odd += [torch.randn(9, dtype=torch.complex64).conj(), torch.randn(70_000)]
    assert checksums(odd).tolist() == [int(checksum(t)) for t in odd]
    assert checksums(odd[-1:]).tolist() == [int(checksum(odd[-1]))]


@pytest.mark.parametrize("every", [0, -1, 1.5, "often"])
def test_no_number_of_steps_is_refused(every):
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="`parity` must be True, False or an integer >= 1"):
        fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, parity=every)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run(SCRIPT, 3, tmp_path_factory.mktemp("parity"))


SOUND = ("sound", "sound, clipped", "sound, tensor parallel")


@pytest.mark.parametrize("case", [pytest.param(case, marks=slow) for case in SOUND])
def test_copies_are_left_in_peace(found, case):
    assert [each[case] for each in found] == [[], [], []]


@pytest.mark.parametrize(
    ("case", "what", "step", "ranks"),
    [
        pytest.param(*values, marks=slow)
        for values in (
            ("clipped on one rank", "gradients", 16, [0]),
            ("flipped bit", "weights", 16, [2]),
            ("other seeds", "gradients", 0, []),
            ("copies of a tensor-parallel bias drift", "weights", 16, [1]),
        )
    ],
)
def test_others_are_found_and_the_odd_rank_is_named(found, case, what, step, ranks):
    for each in found:
        first = each[case][0]
        assert (first["what"], first["step"], first["ranks"]) == (what, step, ranks)
        assert first["num_ranks"] == 3 and first["num_tensors"] >= 1
