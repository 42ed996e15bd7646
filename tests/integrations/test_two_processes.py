"""Two processes that train together under DDP: the same norms, decisions and parameters in both."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import fastguard
from fastguard.sinks import read_jsonl

for package in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(package, reason=f"{package} is not installed")
pytestmark = pytest.mark.slow

FRAMEWORKS = ["transformers", "accelerate", "lightning"]
SCRIPT = Path(__file__).with_name("two_processes.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each process wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(Path(fastguard.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": paths}
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder)],
            env={**os.environ, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in started:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output[-4000:]
    finally:
        for process in started:
            process.kill()
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    for name in FRAMEWORKS:
        found[0][f"with_{name}"]["logged"] = [line["step"] for line in read_jsonl(folder / f"{name}.jsonl")]
    return found


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_both_see_the_same(seen, framework):
    first, other = (one[f"with_{framework}"] for one in seen)
    assert len(first["recorded"]) == 4
    for one in (first, other):
        assert one["recorded"] == pytest.approx(one["norms"], rel=1e-5, nan_ok=True)
        assert one["skipped"] == [False, True, False, False]  # the bad sample is in rank 1's second step
        assert not any(name.startswith("module.") for name in one["names"])
    assert first["recorded"] == pytest.approx(other["recorded"], nan_ok=True, abs=0.0, rel=0.0)
    assert first["parameters"] == other["parameters"]
    finite = (0, 2, 3)
    assert [first["losses"][i] for i in finite] != [other["losses"][i] for i in finite]  # each rank's own
    assert first["logged"] == [0, 1, 2, 3]  # in the one file that both were given
    assert first["log"][-1] == pytest.approx(first["recorded"][-1], rel=1e-6)
