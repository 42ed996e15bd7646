"""What compares optimizers sees every part of them, and what judges them can find fault."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import types
from typing import Any

import pytest
import torch

pytest.importorskip("benchmarks.optimizers", reason="what measures is not beside these tests", exc_type=ImportError)

import odd_optimizers as odd

import fastguard
from benchmarks.optimizers import discovery, packages, state, suite, table, worker
from benchmarks.optimizers.training import RefusedError, Way, train
from benchmarks.optimizers.trial import judge


class Everything(odd.Odd):
    """Keeps something of each kind."""

    def __init__(self, params: odd.Params) -> None:
        super().__init__(params, moments=[torch.ones(2)], betas=(0.9, 0.99))
        self.total, self.flags = 0, {"a", "b"}
        self.inside = torch.optim.SGD(self.param_groups, lr=0.1)
        self.random = random.Random(3)
        self.generator = torch.Generator().manual_seed(4)
        self.schedule = odd.Schedule()
        self.by_address = {id(p): torch.zeros(2) for p in self.param_groups[0]["params"]}
        self.tables = {"deep": [{"deeper": torch.zeros(3)}]}
        self.state["k"] = 1
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"moment": torch.zeros_like(p), "step": 0}


CHANGES: dict[str, tuple[Any, str]] = {
    "parameter": (lambda o: o.param_groups[0]["params"][1].data.add_(1e-7), "parameters[bias]"),
    "state": (lambda o: o.state[o.param_groups[0]["params"][0]]["moment"].add_(1), "state[weight]['moment']"),
    "count": (lambda o: o.state[o.param_groups[0]["params"][0]].update(step=1), "state[weight]['step']"),
    "name": (lambda o: o.state.update(k=2), "state['k']"),
    "type": (lambda o: o.state.update(k=1.0), "state['k']"),
    "group": (lambda o: o.param_groups[0].update(lr=0.02), "param_groups[0]['lr']"),
    "tensor in group": (lambda o: o.param_groups[0]["moments"][0].mul_(-1), "param_groups[0]['moments'][0]"),
    "new in group": (lambda o: o.param_groups[0].update(k=1), "param_groups[0]['k'] (new)"),
    "gone from group": (lambda o: o.param_groups[0].pop("betas"), "param_groups[0]['betas'][0] (gone)"),
    "attribute": (lambda o: setattr(o, "total", 1), "total"),
    "set": (lambda o: o.flags.add("c"), "flags"),
    "inside": (lambda o: setattr(o.inside, "k", 1), "inside.k (new)"),
    "state inside": (lambda o: o.inside.state.update(k=1), "inside.state['k'] (new)"),
    "random": (lambda o: o.random.random(), "random"),
    "generator": (lambda o: torch.rand((), generator=o.generator), "generator"),
    "object": (lambda o: o.schedule(), "schedule.calls"),
    "by address": (lambda o: o.by_address[id(o.param_groups[0]["params"][1])].add_(1), "by_address[bias]"),
    "deep": (lambda o: o.tables["deep"][0]["deeper"].add_(1), "tables['deep'][0]['deeper']"),
    "negative zero": (lambda o: o.tables["deep"][0]["deeper"].mul_(-1), "tables['deep'][0]['deeper']"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found(name):
    model = torch.nn.Linear(2, 2)
    optimizer = Everything(model.parameters())
    before = state.parts(optimizer, model)
    assert state.differences(before, state.parts(optimizer, model)) == []
    change, path = CHANGES[name]
    change(optimizer)
    assert path in state.differences(before, state.parts(optimizer, model))


def test_looking_changes_nothing_that_counts():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    before = state.parts(optimizer, model)
    assert optimizer.state[model.weight] == {}  # makes an entry
    model.weight.grad = torch.ones(2, 2)
    assert state.differences(before, state.parts(optimizer, model)) == []


def way(cls: Any, **settings: Any) -> Way:
    return Way(lambda model: cls(model.parameters()), width=6, num_steps=8, **settings)


class Diverges(odd.Odd):
    def factor(self, group: dict[str, Any]) -> float:
        return 1e30


class Stays(odd.Odd):
    def factor(self, group: dict[str, Any]) -> float:
        return 0.0


class Tosses(odd.Odd):
    def factor(self, group: dict[str, Any]) -> float:
        return time.perf_counter() % 1


class Raises(odd.Odd):
    def factor(self, group: dict[str, Any]) -> float:
        raise NotImplementedError("no factor | for you")


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Diverges, "diverges"),
        (Stays, "does not move"),
        (Tosses, "does not repeat itself"),
        (Raises, "NotImplementedError: no factor | for you (optimizers_outside/test_measuring.py:"),
    ],
)
def test_what_does_not_train_by_itself_is_named_so(cls, reason):
    verdict = judge(cls, way(cls), bad=4)
    assert verdict.unusable.startswith(reason)
    assert table.failures(table.record(verdict)) == {}
    assert table.counts([table.record(verdict)])["run"] == 0


def test_a_bad_step_that_is_taken_is_found():
    outcome = train(way(odd.Odd), settings={"skip_nonfinite": False}, bad=4)
    assert outcome.skipped == []
    assert "parameters[0.weight]" in outcome.changed
    assert not outcome.is_finite
    alone = train(way(odd.Odd), left_out=4)
    assert alone.is_finite and len(alone.losses) == 7
    assert state.differences(alone.parts, outcome.parts)


class Shared(odd.Odd):
    """Counts where nobody looks: each training begins anew, so it repeats itself."""

    count = types.SimpleNamespace(zeroed=0)

    def __init__(self, params: odd.Params) -> None:
        super().__init__(params)
        self.count.zeroed = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.count.zeroed += 1

    def factor(self, group: dict[str, Any]) -> float:
        return 1 / self.count.zeroed


def test_what_shows_only_in_later_steps_is_found():
    record = table.record(judge(Shared, way(Shared), bad=4))
    assert "skip" not in record
    assert table.failures(record)["skip"] == "later steps: parameters[0.weight] and 6 more"


def test_what_wrap_refuses_is_no_failure_of_the_optimizer():
    class Wrapped(odd.Odd):
        """Guarded already."""

    def make(model: torch.nn.Module) -> Any:
        return fastguard.wrap(Wrapped(model.parameters()), max_norm=7.0)

    taken = Way(make, width=6, num_steps=8)
    with pytest.raises(RefusedError, match="AlreadyGuardedError: this Wrapped is guarded already"):
        train(taken, settings={})
    record = table.record(judge(Wrapped, taken, bad=4))
    assert table.failures(record).keys() == {"refused"}
    assert {key: n for key, n in table.counts([record]).items() if n} == {"classes": 1, "run": 1}


class Crashes(odd.Odd):
    def __init__(self, params: odd.Params) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class Hangs(odd.Odd):
    def __init__(self, params: odd.Params) -> None:
        time.sleep(60)


class Spins(odd.Odd):
    def __init__(self, params: odd.Params) -> None:
        while True:
            pass


class CrashesUnderGuard(odd.Odd):
    """A hook on the step is a guard's."""

    def factor(self, group: dict[str, Any]) -> float:
        if self._optimizer_step_pre_hooks:
            os.kill(os.getpid(), signal.SIGTERM)
        return 1.0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Crashes, "ended its process: SIGTERM"),
        (Hangs, "took longer than 1 s"),
        (Spins, "took more than 1 s of CPU time"),
    ],
)
def test_a_class_that_takes_its_process_along(monkeypatch, cls, reason):
    monkeypatch.setattr(worker, "SECONDS", 0.1)  # as a limit of the system that is 1 s
    monkeypatch.setattr(worker, "PATIENCE", 200 if cls is Spins else 10)
    assert worker.ask(packages.Package("none", ()), cls).unusable.startswith(reason)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_class_that_takes_its_process_along_only_under_guard():
    verdict = worker.ask(packages.Package("none", ()), CrashesUnderGuard)
    assert verdict.unusable is None
    signs = table.failures(table.record(verdict))
    assert signs["skip"] == signs["clip"] == "ended its process: SIGTERM"
    assert signs["idle"] == "wrap: ended its process: SIGTERM"


def test_a_package_that_fails_loses_no_other(monkeypatch, tmp_path, capsys):
    def lines(name: str, *_: Any) -> list[dict[str, Any]]:
        if name == "madgrad" and failing:
            raise RuntimeError("madgrad: its process ended with 9")
        asked.append(name)
        return [{"package": name, "version": "1", "cpu_seconds": 1.0}]

    monkeypatch.setattr(suite, "lines_of", lines)
    monkeypatch.setattr(suite, "PARTIAL", tmp_path / "partial.json")
    asked: list[str] = []
    failing, path = True, tmp_path / "results.json"
    assert suite.main(["--json", str(path)]) == 1
    assert "madgrad: its process ended with 9" in capsys.readouterr().err and not path.exists()
    assert len(asked) == len(packages.PACKAGES) - 1
    asked.clear()
    failing = False
    assert suite.main(["--json", str(path), "--resume"]) == 0
    assert asked == ["madgrad"] and not suite.PARTIAL.exists()
    assert [*json.loads(path.read_text())["packages"]] == [package.name for package in packages.PACKAGES]


def test_a_package_that_says_nothing_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(suite, "SECONDS", 0.001)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        (tmp_path / "lines").touch()
        assert suite._ended(process, tmp_path / "lines") == "saying nothing for 0 s"


def test_classes_are_found_in_modules():
    classes, failed = discovery.classes(("torch.optim",))
    names = [cls.__qualname__ for cls in classes]
    assert {"AdamW", "LBFGS", "SparseAdam"} <= set(names) and "SequentialLR" not in names
    assert len(set(classes)) == len(classes) and not failed


def test_the_tables():
    def package(*verdicts: dict[str, Any]) -> dict[str, Any]:
        return {"package": "p", "version": "1", "cpu_seconds": 60.0, "verdicts": list(verdicts)}

    good = {"name": "Good", "module": "p.a", "clip_torch": 1e-8}
    twin = {"name": "Good", "module": "p.b", "clip_torch": 0.5, "clip_torch_ulp": 0.4}
    bad = {"name": "Bad", "module": "p.b", "skip": ["parameters[w]", "k"], "idle": {"wrap": ["k"]}, "clip_torch": 0.0}
    none = {"name": "None", "module": "p.b", "unusable": "needs | a GPU", "note": "base class of 2"}
    missing = {"package": "q", "missing": "ImportError: q", "verdicts": []}
    results = {
        "packages": {"p": package(good, twin, bad, none), "q": missing},
        "conditions": dict.fromkeys(("fastguard", "commit", "torch", "python", "cpu", "date"), "x"),
    }
    assert table.rows(results)[-1] == ("all", "", "4", "3", "2", "2", "3", "2")
    assert table.rows(results)[1][:2] == ("q", "not installed")
    pages = {name: "\n".join(make(results)) for name, make in table.TABLES.items()}
    assert "| p: Bad | skip | `parameters[w] and 1 more` |" in pages["failures"]
    assert pages["optimizers"].endswith("fastguard x (x), torch x, Python x, x, x; 1 minutes of CPU time.")
    assert "| p: b.Good | 5.0e-01 | 4.0e-01 |" in pages["far"]
    assert "`needs \\| a GPU` (base class of 2)" in pages["unusable"]
    mended = {"packages": {"p": package(good, twin, {**good, "name": "Bad", "module": "p.b"}, none)}}
    assert table.changes(results, mended) == ["p: Bad: idle, skip -> holds"]
