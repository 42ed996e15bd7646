"""The examples under torchrun: one rank's NaN, resumes on one rank and on four, and a rank that dies."""

import json
import re
import shutil
from pathlib import Path

import pytest
from several_processes import slow, torchrun

from fastguard.sinks import read_jsonl

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [
    *slow,
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="examples/ is not beside the tests: they run from a copy"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What was printed, and the folder: of the first run, on two ranks, and of those that go on on one and on four."""
    first = tmp_path_factory.mktemp("fsdp2")
    found = {2: (torchrun(2, str(EXAMPLES / "fsdp2.py"), str(first)), first)}
    for world in (1, 4):
        folder = first.with_name(f"{first.name}-on-{world}")
        shutil.copytree(first, folder)
        found[world] = torchrun(world, str(EXAMPLES / "fsdp2.py"), str(folder), "--resume"), folder
    return found


def last_norms(said, world, num_steps):
    found = re.findall(rf"^rank \d of {world}: {num_steps} steps, the last norm (\S+)$", said, re.MULTILINE)
    assert len(found) == world, said
    return [float(norm) for norm in found]


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def test_both_ranks_skip_what_one_of_them_held(runs):
    said, _ = runs[2]
    for rank in (0, 1):
        assert f"rank {rank} of 2: step 12 was skipped, for ['layers.1.linear1.weight']\n" in said
    assert "rank 1, layers.1.linear1.weight: 3 NaN; the others were finite" in said
    assert "ranks             2; 1 held NaN or Inf" in said
    assert len(set(last_norms(said, 2, 20))) == 1


def test_it_goes_on_on_another_number_of_ranks(runs):
    (alone,) = last_norms(runs[1][0], 1, 30)
    four = last_norms(runs[4][0], 4, 30)
    assert len(set(four)) == 1
    assert four[0] == pytest.approx(alone, rel=1e-5)  # the same batches, shared out otherwise


@pytest.mark.parametrize("world", [1, 4])
def test_the_report_and_the_log_know_the_whole_run(runs, world):
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


def test_a_run_that_torchrun_starts_anew_goes_on_and_says_so(tmp_path):
    often = "--max-restarts", "1", "--monitor-interval", "0.1"
    said = torchrun(
        2, *often, str(EXAMPLES / "elastic.py"), str(tmp_path), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"
    )  # see the example
    assert "attempt 2, from step 10\n" in said and "torchrun restarted this run: attempt 2" in said
    assert "\nrestarts          1 by torchrun\n" in said and "\nsteps             20, the last is step 19\n" in said
    lines = log_of(tmp_path)
    restarts = [line["model"]["num_restarts"] for line in lines if line.get("model", {}).get("num_restarts")]
    assert restarts == [1]
    written = [line["step"] for line in lines if "step" in line]
    # Those after the checkpoint were taken twice: by the attempt that died, and by the one that counts.
    assert written[:12] == [*range(12)] and written[-10:] == [*range(10, 20)]
    log = read_jsonl(tmp_path / "log.jsonl")
    assert {line["step"] for line in log} == {*range(20)}
