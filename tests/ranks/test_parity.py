"""Replicas that are no copies of each other are found, by tensor and rank; those that are, are left in peace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_ranks import run

import fastguard
from fastguard.guard.ranks.parity import checksum
from fastguard.history import TrainingHistory

SCRIPT = Path(__file__).with_name("parity_script.py")
HAS_GLOO = dist.is_available() and dist.is_gloo_available()


def test_a_checksum_is_of_the_bits_in_any_order() -> None:
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


def test_what_was_found_is_told_from_a_log_too() -> None:
    history = TrainingHistory()
    event = {"step": 20, "what": "weights", "name": "a", "num_tensors": 2, "num_ranks": 4, "ranks": [3]}
    history.note_model(replica_differences=[event])
    history.record(20, loss=1.0, grad_norm=1.0, lr=0.1)
    finding = next(one for one in fastguard.diagnosis.diagnose(history) if one.rule == "replicas-differ")
    assert finding.severity == "critical" and finding.layers == ("a",)
    assert "rank 3 has others" in finding.summary and finding.evidence["odd_rank"] == 3.0


@pytest.mark.parametrize("parity", [0, -1, 1.5, "often"])
def test_no_number_of_steps_is_refused(parity: Any) -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="`parity` must be True, False or an integer >= 1"):
        fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, parity=parity)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(SCRIPT, 3, tmp_path_factory.mktemp("parity"))


slow = [pytest.mark.slow, pytest.mark.skipif(not HAS_GLOO, reason="this torch has no gloo")]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=slow) for case in ("sound", "sound, clipped", "sound, tensor parallel")],
)
def test_copies_are_left_in_peace(found: list[dict[str, Any]], case: str) -> None:
    assert [each[case] for each in found] == [[], [], []]


@pytest.mark.parametrize(
    ("case", "what", "step", "ranks"),
    [
        pytest.param(*values, marks=slow)
        for values in (
            ("past the wrapper", "gradients", 0, []),
            ("no communication", "gradients", 0, []),
            ("clipped on one rank", "gradients", 16, [0]),
            ("flipped bit", "weights", 16, [2]),
            ("other seeds", "gradients", 0, []),
            ("copies of a tensor-parallel bias drift", "weights", 16, [1]),
        )
    ],
)
def test_others_are_found_and_the_odd_rank_is_named(
    found: list[dict[str, Any]], case: str, what: str, step: int, ranks: list[int]
) -> None:
    for each in found:
        first = each[case][0]
        assert (first["what"], first["step"], first["ranks"]) == (what, step, ranks)
        assert first["num_ranks"] == 3 and first["num_tensors"] >= 1
