"""examples/fsdp2.py under torchrun: one rank's NaN, a step that all skip, and a resume on one rank and on four."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from several_processes import slow, torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2.py"
pytestmark = [
    *slow,
    pytest.mark.skipif(not EXAMPLE.is_file(), reason="examples/ is not beside the tests: they run from a copy"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, Path]]:
    """What was printed, and the folder: of the first run, on two ranks, and of those that go on on one and on four."""
    first = tmp_path_factory.mktemp("fsdp2")
    found = {2: (torchrun(2, str(EXAMPLE), str(first)), first)}
    for world in (1, 4):
        folder = first.with_name(f"{first.name}-on-{world}")
        shutil.copytree(first, folder)
        found[world] = torchrun(world, str(EXAMPLE), str(folder), "--resume"), folder
    return found


def last_norms(said: str, world: int, num_steps: int) -> list[float]:
    found = re.findall(rf"^rank \d of {world}: {num_steps} steps, the last norm (\S+)$", said, re.MULTILINE)
    assert len(found) == world, said
    return [float(norm) for norm in found]


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def test_both_ranks_skip_what_one_of_them_held(runs: dict[int, tuple[str, Path]]) -> None:
    said, _ = runs[2]
    for rank in (0, 1):
        assert f"rank {rank} of 2: step 12 was skipped, for ['layers.1.linear1.weight']\n" in said
    assert "rank 1, layers.1.linear1.weight: 3 NaN; the others were finite" in said
    assert "ranks             2; 1 held NaN or Inf" in said
    assert len(set(last_norms(said, 2, 20))) == 1


def test_it_goes_on_on_another_number_of_ranks(runs: dict[int, tuple[str, Path]]) -> None:
    (alone,) = last_norms(runs[1][0], 1, 30)
    four = last_norms(runs[4][0], 4, 30)
    assert len(set(four)) == 1
    assert four[0] == pytest.approx(alone, rel=1e-5)  # the same batches, shared out otherwise


@pytest.mark.parametrize("world", [1, 4])
def test_the_report_and_the_log_know_the_whole_run(runs: dict[int, tuple[str, Path]], world: int) -> None:
    said, folder = runs[world]
    assert "WARNING after 30 steps: 1 warning" in said
    assert "Rank 1 alone of 2 held NaN, first at step 12 in layers.1.linear1.weight." in " ".join(said.split())
    assert f"\nranks             {world}; 1 held NaN or Inf\n" in said
    assert ("\ncost of ranks     " in said) == (world > 1)
    lines = log_of(folder)
    assert [line["step"] for line in lines if "step" in line] == list(range(30))
    bad = [line["model"]["bad_ranks"] for line in lines if "bad_ranks" in line.get("model", {})]
    rank = {"rank": 1, "num_ranks": 2, "step": 12, "num_nans": 3, "num_infs": 0, "num_steps": 1}
    assert {**rank, "name": "layers.1.linear1.weight"} in bad[-1]
