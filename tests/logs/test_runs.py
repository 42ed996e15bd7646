"""A log has one run and says whether it has ended, and everything that reads it gives the same verdict."""

import json
import logging
import os

import pytest
import torch
from torch import nn

import fastguard
import fastguard.report
from fastguard.commands import cli
from fastguard.commands.watch import FollowedRun, lines_of
from fastguard.integrations.common import begin, end
from fastguard.records import TrainingHistory
from fastguard.records.log import LogReader
from fastguard.report import build_report
from fastguard.report.text import headline
from fastguard.sinks import read_jsonl
from fastguard.visualization.runs import runs_of

Verdict = tuple[str, list[tuple[str, str]]]
KEPT = []


@pytest.fixture
def path(tmp_path):
    yield tmp_path / "run.jsonl"
    KEPT.clear()


def falling(step):
    return 2.3 - 0.04 * step


def start(sink, state=None):
    """A guard of a new model, resumed from `state` if there is one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    guard = fastguard.wrap(optimizer, model, max_norm=1.0, sinks=[sink]).guard
    KEPT.append((model, optimizer))  # the guard does not
    if state is not None:
        guard.load_state_dict(state)
    return guard


def train(guard, num_steps, loss=falling, bad=()):
    (optimizer,) = guard.optimizers
    for _ in range(num_steps):
        step = guard._run.step
        optimizer.zero_grad()
        scale = float("nan") if step in bad else 1.0
        x = torch.randn(16, 6)
        ((guard.model(x) - x.sum(1, keepdim=True)).square().mean() * scale).backward()
        optimizer.step()
        guard.observe(loss=loss(step))
    return guard


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines() if '"step"' in line]


def verdicts(path, capsys):
    """Status, and severity and name of each finding, as each command that reads the log says."""
    found = {}
    cli.main(["diagnose", str(path), "--json"])
    plain = json.loads(capsys.readouterr().out)
    found["diagnose"] = plain["status"], [(one["severity"], one["rule"]) for one in plain["findings"]]
    followed = FollowedRun(path)
    followed.read()
    found["watch"] = verdict(followed.report)
    found["from_jsonl"] = verdict(build_report(TrainingHistory.from_jsonl(path)))
    found["figures"] = verdict(build_report(*runs_of(path)))
    return found


def verdict(report):
    return report.status, [(one.severity, one.rule) for one in report.findings]


class TestOneVerdict:
    @pytest.mark.parametrize("ending", ["closed", "ended by a framework", "still open"])
    @pytest.mark.parametrize(
        ("num_steps", "bad", "status"),
        [(5, (), "healthy"), (10, (), "healthy"), (40, (), "healthy"), (40, (20, 21), "warning")],
    )
    def test_all_readers_agree(self, path, capsys, num_steps, bad, status, ending):
        guard = train(start(fastguard.JsonlSink(path, tensors_every=1)), num_steps, bad=bad)
        {"closed": guard.close, "ended by a framework": lambda: end(guard), "still open": guard.flush}[ending]()
        expected = verdict(guard.report())
        assert expected[0] == status
        falls = ("info", "loss-still-falling") in expected[1]
        assert falls == (ending != "still open" and num_steps > 25)
        assert verdicts(path, capsys) == dict.fromkeys(["diagnose", "watch", "from_jsonl", "figures"], expected)
        fails = int(expected[0] != "healthy")
        assert cli.main(["diagnose", str(path)]) == fails

    def test_a_run_that_continues_has_not_ended(self, path, capsys):
        """Neither when a framework trains again, nor when another process resumes it."""
        guard = train(start(fastguard.JsonlSink(path)), 20)
        end(guard)
        assert TrainingHistory.from_jsonl(path).has_ended
        begin(guard, None, None)
        train(guard, 20)
        guard.flush()
        assert not guard.history.has_ended and not TrainingHistory.from_jsonl(path).has_ended
        guard.close()
        resumed = train(start(fastguard.JsonlSink(path), guard.state_dict()), 5)
        resumed.flush()
        assert not resumed.history.has_ended and not TrainingHistory.from_jsonl(path).has_ended
        assert len(set(map(str, verdicts(path, capsys).values()))) == 1

    def test_watch_shows_severity_and_count_as_they_are_now(self, path):
        """Not those of the step at which a finding was new."""
        run = FollowedRun(path)
        guard = start(fastguard.JsonlSink(path))
        for bad in ([61], [70, 75, 80]):
            train(guard, 30 if bad != [61] else 65, bad=bad)
            guard.flush()
            run.read()
        (now,) = [one for one in run.report.findings if one.rule == "non-finite-gradients"]
        assert "4 steps of 95" in now.summary
        assert list(map(headline, run.report.findings)) == list(map(headline, guard.report().findings))


class TestOneRunPerLog:
    def test_another_run_goes_to_a_file_beside_it(self, path, caplog):
        sinks = [fastguard.JsonlSink(path) for _ in range(3)]
        for sink in sinks:
            with caplog.at_level(logging.WARNING, "fastguard"):
                train(start(sink), 30).close()
        said = [record.getMessage() for record in caplog.records if "another run" in record.getMessage()]
        assert said == [
            f"log {path} holds another run; this run is written to {path.with_name(f'run-{n}.jsonl')}" for n in (2, 3)
        ]
        assert [sink.path.name for sink in sinks] == ["run.jsonl", "run-2.jsonl", "run-3.jsonl"]
        assert all(steps_in(sink.path) == list(range(30)) for sink in sinks)
        assert len({read_jsonl(sink.path).run_id for sink in sinks}) == 3

    @pytest.mark.parametrize("command", ["diagnose", "report -o -"])
    def test_commands_name_a_newer_run(self, path, command, capsys):
        for second in range(3):
            sink = fastguard.JsonlSink(path)
            train(start(sink), 3).close()
            os.utime(sink.path, (second, second))
        for log, newest in ((path, "run-3.jsonl"), (path.with_name("run-2.jsonl"), "run-3.jsonl"), (sink.path, "")):
            cli.main([*command.split(), str(log)])
            assert (f"{log} holds an older run: the newest is in {newest}\n" in capsys.readouterr().err) == bool(newest)
        view = lines_of(FollowedRun(path))
        assert any("the newest is in run-3.jsonl" in line for line in view)

    def test_a_resumed_run_continues_in_its_own_file(self, path):
        """Whichever that is: `load_state_dict` comes after the sink was opened, and may come after steps."""
        first = train(start(fastguard.JsonlSink(path)), 10)
        second = train(start(fastguard.JsonlSink(path)), 10)
        states = first.state_dict(), second.state_dict()
        first.close()
        second.close()
        for state in states:
            train(start(fastguard.JsonlSink(path), state), 5).close()
        third = train(start(fastguard.JsonlSink(path)), 3)
        third.load_state_dict(states[0])
        train(third, 2).close()
        assert steps_in(path) == [*range(15), 10, 11]
        assert steps_in(path.with_name("run-2.jsonl")) == list(range(15))
        assert steps_in(path.with_name("run-3.jsonl")) == [0, 1, 2]
        assert read_jsonl(path).num_runs == read_jsonl(path.with_name("run-2.jsonl")).num_runs == 1

    def test_a_state_of_a_rank_without_sinks_continues_in_the_file(self, path):
        first = train(start(fastguard.JsonlSink(path)), 10)
        state = first.state_dict()
        first.close()
        state["history"]["model"]["run_id"] = ""
        train(start(fastguard.JsonlSink(path), state), 5).close()
        assert [file.name for file in path.parent.iterdir()] == [path.name]
        assert steps_in(path) == list(range(15)) and read_jsonl(path).num_runs == 1

    def test_a_cell_that_is_run_again(self, path):
        """Around the same optimizer the run goes on; its page counts each step once."""
        guard = train(start(fastguard.JsonlSink(path)), 10)
        (optimizer,) = guard.optimizers
        fastguard.wrap(optimizer, guard.model, max_norm=1.0, sinks=[fastguard.JsonlSink(path)])
        train(guard, 10)
        again = train(start(fastguard.JsonlSink(path)), 20)
        for one, log in ((guard, path), (again, path.with_name("run-2.jsonl"))):
            (drawn,) = runs_of(one)
            assert drawn.name.endswith(log.stem) and drawn.num_steps == one.report().numbers["num_steps"] == 20

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_processes_that_start_at_once_get_a_file_each(self, path):
        children = []
        for _ in range(4):
            child = os.fork()
            if not child:
                train(start(fastguard.JsonlSink(path)), 40).close()
                os._exit(0)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
        for name in ("run.jsonl", "run-2.jsonl", "run-3.jsonl", "run-4.jsonl"):
            assert steps_in(path.with_name(name)) == list(range(40))

    def test_a_run_without_a_step_leaves_the_file_to_the_next(self, path):
        start(fastguard.JsonlSink(path)).close()
        sink = fastguard.JsonlSink(path)
        train(start(sink), 3).close()
        assert sink.path == path and read_jsonl(path).num_runs == 1

    def test_a_file_of_another_kind_is_left_alone(self, path):
        path.write_text("step,loss\n")
        train(start(fastguard.JsonlSink(path)), 3).close()
        assert path.read_text() == "step,loss\n" and steps_in(path.with_name("run-2.jsonl")) == [0, 1, 2]


def old_lines(*runs):
    """A log of version 0.2, which had no run ids: a note and the steps of each run."""
    lines = []
    for number, steps in enumerate(runs):
        lines.append({"time": 1.0, "model": {"names": [f"run{number}"], **({} if number else {"zero_lr": ["run0"]})}})
        lines += [{"step": step, "time": 1.0, "loss": number + 0.1, "grad/norm": 1.0} for step in steps]
    return "".join(json.dumps(line) + "\n" for line in lines)


class TestSeveralRunsInALog:
    @pytest.mark.parametrize("num_steps", [5, 120])
    def test_the_last_is_read_and_readers_say_so(self, path, num_steps, caplog, capsys):
        followed = FollowedRun(path)
        for _ in range(3):
            train(start(fastguard.JsonlSink(path, append=True)), num_steps).close()
            followed.read()
            assert followed.history.num_steps == num_steps
        assert steps_in(path) == list(range(num_steps)) * 3
        caplog.clear()
        history, log = TrainingHistory.from_jsonl(path), read_jsonl(path)
        assert [record.getMessage() for record in caplog.records] == [
            f"log {path} holds 3 runs; only the last one is read"
        ] * 2
        assert history.num_steps == len(log) == num_steps and history.model.run_id == log.run_id
        assert TrainingHistory.from_log(log).state_dict() == history.state_dict()
        (drawn,) = runs_of(path)
        assert len(drawn.curves["clipped"].items) == num_steps
        assert followed.log.num_runs == 3

    def test_old_logs(self, path):
        """Step 0 after other steps is another run's; what was noted before it belongs to that run."""
        path.write_text(old_lines(range(120), range(50)))
        history = TrainingHistory.from_jsonl(path)
        assert history.num_steps == 50 and history.losses.max == 1.1 and not history.has_ended
        assert history.model.names == ("run1",) and history.model.zero_lr == ()
        reader = LogReader(path)
        assert [record["step"] for record in reader if reader.num_runs == 2] == list(range(50))
        run = FollowedRun(path)
        run.read()
        assert run.history.state_dict() == history.state_dict() and run.log.num_runs == 2
        assert TrainingHistory.from_log(read_jsonl(path)).state_dict() == history.state_dict()

    def test_an_old_run_that_was_resumed_is_one(self, path):
        path.write_text(old_lines(range(50), range(40, 60)))
        assert TrainingHistory.from_jsonl(path).num_steps == len(read_jsonl(path)) == 70

    def test_an_old_run_is_resumed_in_its_file(self, path):
        guard = train(start(fastguard.MemorySink()), 10)
        state = guard.state_dict()
        del state["history"]["model"]["run_id"], state["history"]["model"]["has_ended"]
        path.write_text(old_lines(range(10)))
        train(start(fastguard.JsonlSink(path), state), 5).close()
        assert steps_in(path) == list(range(15)) and len(read_jsonl(path)) == 15
