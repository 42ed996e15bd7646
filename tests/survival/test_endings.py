"""However a process ends, or forks, each record is in the log once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fastguard

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]

# How each ends, and the steps that are in its log then. See the functions of that name in endings_script.py.
EXPECTED = {
    "exits": (3, 3),
    "exits_at_once": (4, 2),  # os._exit
    "trains_in_a_thread": (0, 3),
    "is_terminated": (-signal.SIGTERM, 3),
    "is_terminated_and_leaves_that_alone": (-signal.SIGTERM, 2),
    "handles_sigterm_already": (5, 3),
    "ignores_sigterm": (6, 6),
    "takes_sigterm_over_and_passes_it_on": (7, 6),
    "is_terminated_while_a_sink_writes": (-signal.SIGTERM, 2),
    "is_terminated_twice_while_a_sink_hangs": (-signal.SIGTERM, 1),
    "is_terminated_while_a_thread_trains": (-signal.SIGTERM, None),
    "closes": (0, 3),
    "forks": (0, 4),
    "forks_by_multiprocessing": (0, 3),
    "forks_after_a_parallel_region": (0, 3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("endings")
    root = str(Path(fastguard.__path__[0]).parent)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("endings_script.py")), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])},
    )
    assert done.returncode == 0, done.stderr
    (folder / "ended.json").write_text(done.stdout)
    return folder


def _steps(path: Path) -> list[int]:
    return [line["step"] for line in map(json.loads, path.read_text().splitlines()) if "step" in line]


@pytest.mark.parametrize("name", EXPECTED)
def test_each_record_is_there_once(name: str, folder: Path) -> None:
    code, num_steps = EXPECTED[name]
    ended = json.loads((folder / "ended.json").read_text())
    assert ended.keys() == EXPECTED.keys()
    stderr = (folder / f"{name}.stderr").read_text()
    assert ended[name] == code, stderr
    steps = _steps(folder / name)
    if num_steps is None:  # all that the thread had taken when the signal came; it goes on until the process ends
        num_steps = len(steps)
        assert num_steps >= int((folder / name).with_suffix(".taken").read_text()) >= 20
    assert steps == list(range(num_steps))


def test_a_sink_that_has_a_record_in_hand_is_let_finish_it_and_later_ones_get_theirs(folder: Path) -> None:
    after = (folder / "is_terminated_while_a_sink_writes").with_suffix(".after")
    assert after.read_text() == "[1]"
