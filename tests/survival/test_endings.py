"""However a process ends, or forks, each record is in the log once. The last reference to a guard frees what it holds,
without the garbage collector, as torch's tests want it."""

import gc
import json
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import fastguard

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
def folder(tmp_path_factory):
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    folder = tmp_path_factory.mktemp("endings")
    root = str(Path(fastguard.__path__[0]).parent)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("endings_script.py")), str(folder), *EXPECTED],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])},
    )
    assert done.returncode == 0, done.stderr
    (folder / "ended.json").write_text(done.stdout)
    return folder


def _steps(path):
    return [line["step"] for line in map(json.loads, path.read_text().splitlines()) if "step" in line]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_each_record_is_there_once(name, folder):
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


@pytest.mark.slow
def test_a_sink_that_has_a_record_in_hand_is_let_finish_it_and_later_ones_get_theirs(folder):
    after = (folder / "is_terminated_while_a_sink_writes").with_suffix(".after")
    assert after.read_text() == "[1]"


SETTINGS = {
    "plain": lambda folder: {},
    "clipping": lambda folder: {"max_norm": 1.0},
    "a log": lambda folder: {"sinks": [fastguard.JsonlSink(folder / "run.jsonl")]},
    "sinks": lambda folder: {"sinks": [fastguard.MemorySink(), lambda record: None]},
    "activations": lambda folder: {"activations": {"every": 1, "modules": "all"}},
    "weights": lambda folder: {"weights": 1},
    "recovery": lambda folder: {"recovery": fastguard.Recovery(every=1)},
    "everything": lambda folder: {
        "max_norm": 1e-3,
        "activations": {"every": 2},
        "weights": 2,
        "check_every": 1,
        "sinks": [fastguard.JsonlSink(folder / "run.jsonl"), fastguard.MemorySink()],
    },
}


@pytest.fixture(autouse=True)
def _no_gc():
    gc.disable()
    yield
    gc.enable()


def _step(model, optimizer):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


CASES = [(name, 3, True) for name in SETTINGS] + [("plain", 0, True), ("plain", 3, False), ("everything", 0, True)]


@pytest.mark.parametrize(("name", "num_steps", "with_model"), CASES)
def test_nothing_is_left_to_the_collector(name, num_steps, with_model, tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    _step(model, torch.optim.SGD(model.parameters(), lr=0.5))
    str(fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.5)).guard.report())
    gc.freeze()  # what is there by now, torch's and the rules' own things among it, is not looked through
    given = SETTINGS[name](tmp_path)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.5), model if with_model else None, **given)
    given.clear()
    for _ in range(num_steps):
        _step(model, optimizer)
    guard = optimizer.guard
    str(guard.report())
    refs = [weakref.ref(x) for x in (optimizer, guard, guard._run, guard._ledger, guard._judge, guard.history)]
    del optimizer, guard
    assert [ref() for ref in refs] == [None] * len(refs)
    assert gc.collect() == 0
    _step(model, torch.optim.SGD(model.parameters(), lr=0.5))  # no hook is left that calls what is gone
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_last_record_is_written_where_all_goes_at_once():
    records = fastguard.MemorySink()
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    fastguard.wrap(optimizer, model, activations={"every": 1, "overhead_budget": None}, sinks=[records])
    _step(model, optimizer)
    optimizer.itself = optimizer  # left to the collector, which clears weak references before anybody is told
    del optimizer, model
    assert not records.records
    gc.collect()
    assert [record.step for record in records.records] == [0]
