"""`fastguard diagnose` and `fastguard rules`: reports from logs, exit codes, and no torch."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastguard.commands import cli
from fastguard.commands.diagnose import EXIT_CODES, EXIT_UNREADABLE
from fastguard.diagnosis import RULES
from fastguard.records import StepStats, TrainingHistory
from fastguard.records.samples import WeightStats
from fastguard.report import build_report
from fastguard.sinks import JsonlSink

from made_runs import activity, bend, falling_losses, noisy_norms
from records import make_bad_record, make_batch, make_record, make_row, make_table


def records(losses, bad=(), **fields):
    for step, (loss, norm) in enumerate(zip(losses, noisy_norms(len(losses)))):
        more = {"loss": loss, "lr": 1e-3, **fields}
        yield make_bad_record(step, ["b"], **more) if step in bad else make_record(step, norm, **more)


def write(path, steps, **options):
    with JsonlSink(path, **options) as sink:
        for record in steps:
            sink.write(record)
    return str(path)


def history_of(steps):
    history = TrainingHistory()
    for record in steps:
        history.add(record)
    return history


@pytest.fixture
def healthy(tmp_path):
    return write(tmp_path / "healthy.jsonl", records(falling_losses(200)))


class TestExitCode:
    def test_a_folder_stands_for_the_newest_log_in_it(self, healthy, capsys):
        assert cli.main(["diagnose", os.path.dirname(healthy)]) == 0
        assert capsys.readouterr().out.startswith("HEALTHY after 200 steps")

    def test_critical(self, tmp_path, capsys):
        path = write(tmp_path / "run.jsonl", records([*falling_losses(99), math.nan], bad=[99]))
        assert cli.main(["diagnose", path]) == 2
        assert "Likely cause: bad-batch" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [
            (["missing.jsonl"], 3, "error: missing.jsonl: No such file or directory\n"),
            (["{empty}"], 3, "error: there is no *.jsonl in"),
            (["{other}"], 3, "a log must have one JSON object per line, got 'epoch,loss' - at"),
            (["{nosteps}"], 3, "`path` must be a log of steps, got a record without `step`"),
            ([], 64, "the following arguments are required: log"),
            (["{healthy}", "--set", "norm-spike"], 64, "`--set` must be RULE.THRESHOLD=NUMBER, got 'norm-spike'"),
            (["{healthy}", "--set", "norm-spik.z=1"], 64, "Did you mean `norm-spike.z`"),
            (["{healthy}", "--set", "norm-spike.ratio=big"], 64, "`--set` must give a finite number"),
            (["{healthy}", "--set", "norm-spike.ratio=inf"], 64, "`--set` must give a finite number"),
            (["{healthy}", "--set", "norm-spike.size=3"], 64, "Did you mean `norm-spike."),
        ],
    )
    def test_errors_cannot_be_taken_for_a_diagnosis(self, arguments, code, message, healthy, tmp_path, capsys):
        (tmp_path / "other").write_text("epoch,loss\n1,2\n")
        (tmp_path / "nosteps").write_text('{"loss": 1}\n')
        (tmp_path / "empty").mkdir()
        places = {"healthy": healthy, **{name: tmp_path / name for name in ("other", "nosteps", "empty")}}
        given = ["diagnose", *(argument.format(**places) for argument in arguments)]
        try:
            left_with = cli.main(given)
        except SystemExit as leaving:
            left_with = leaving.code
        said = capsys.readouterr()
        assert left_with == code and not said.out
        assert message in said.err and said.err.count("\n") == 1 and said.err.startswith("fastguard diagnose: error:")

    @pytest.mark.parametrize(
        ("lines", "code"),
        [
            ([{"step": s, "loss": 1.0 + s % 3} for s in range(40)], 4),  # a log without a gradient is not one of zeros
            ([{"step": s, "loss": 1.0, "grad/norm": 0.0} for s in range(9)], 4),
            ([{"step": s, "loss": 1.0, "grad/norm": 0.0} for s in range(10)], 2),
            ([{"step": s, "loss": 1.0 / (s + 1), "grad/norm": 1.0} for s in range(9)], 0),
        ],
    )
    def test_no_run_is_healthy_without_a_gradient(self, lines, code, tmp_path, capsys):
        path = tmp_path / "run.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines).replace("NaN", '"NaN"'))
        assert cli.main(["diagnose", str(path), "--json"]) == code
        status = json.loads(capsys.readouterr().out)["status"]
        assert status == {0: "healthy", 2: "critical", 4: "no-evidence"}[code]
        assert cli.main(["report", str(path), "-o", "-", "--fail-on", "warning"]) == int(code > 0)
        assert status.upper().replace("-", " ") in capsys.readouterr().out

    def test_every_code_stands_in_the_help(self, capsys):
        with pytest.raises(SystemExit):
            cli.main(["diagnose", "--help"])
        said = capsys.readouterr().out
        codes = [*EXIT_CODES.values(), EXIT_UNREADABLE, cli.EXIT_USAGE]
        assert len(set(codes)) == len(codes) and all(re.search(rf"\b{code} ", said) for code in codes)


class TestDiagnose:
    def test_says_what_the_run_itself_would_have_said(self, tmp_path, capsys):
        steps = list(records([*falling_losses(120), *[9.0] * 30], bad=[20, 60]))
        cli.main(["diagnose", write(tmp_path / "run.jsonl", steps, tensors_every=1), "--json"])
        assert json.loads(capsys.readouterr().out) == build_report(history_of(steps)).to_dict()

    def test_other_thresholds(self, tmp_path):
        path = write(tmp_path / "run.jsonl", records(bend(falling_losses(200), [150], lambda v: 30.0)))
        assert cli.main(["diagnose", path, "--set", "loss-spike.z=1e9", "--set", "norm-spike.z=1e9"]) == 0

    def test_a_log_that_a_crash_cut_off(self, healthy, capsys):
        whole = Path(healthy).read_bytes()
        Path(healthy).write_bytes(whole[:-30])
        assert cli.main(["diagnose", healthy]) == 0
        said = capsys.readouterr()
        assert said.out.startswith("HEALTHY after 199 steps")
        assert said.err == "fastguard diagnose: 1 line was cut off or damaged, and left out: [200]\n"

    def test_without_torch_or_numpy(self, healthy):
        code = (
            "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; from fastguard.commands.cli import main; "
        )
        for command in (f"['diagnose', {healthy!r}]", "['rules']"):
            done = subprocess.run(
                [sys.executable, "-W", "error", "-c", code + f"sys.exit(main({command}))"],
                capture_output=True,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            assert done.returncode == 0, done.stderr


class TestRules:
    def test_lists_each_with_thresholds_and_source(self, capsys):
        assert cli.main(["rules"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        for name, rule in RULES.items():
            assert f"{name} [{rule.family}, up to {rule.severity}]" in text
            assert f"source: {rule.source}" in text
            for threshold, value in rule.thresholds.items():
                assert f"{threshold}={value:g}" in text

    def test_unknown(self, capsys):
        with pytest.raises(SystemExit) as leaving:
            cli.main(["rules", "spike"])
        assert leaving.value.code == 64
        assert "unknown rule 'spike'. Did you mean `" in capsys.readouterr().err


class TestFromJsonl:
    def full_records(self):
        names = ["a.weight", "NaN", "c"]
        for step in range(60):
            nan = step == 40
            rows = [make_row(1.0 + step % 3, 8, num_zeros=2), make_row(0.5, 4, num_nans=int(nan)), make_row(2.0, 4)]
            sampled = step % 10 == 0
            yield StepStats(
                step,
                make_table(rows, names),
                clip_coef=0.5,
                skipped=nan,
                loss=math.nan if nan else 2.0 - step / 60,
                val_loss=2.5 if step == 30 else None,
                lr=1e-3,
                loss_scale=1024.0,
                activations=(activity("NaN", zero=0.5, dead=0.25, nans=int(nan)),) if sampled else (),
                weights=(WeightStats("c", 4, 2.0, 0.5, math.inf, 0.1, None, 1),) if sampled else (),
                batches=(make_batch(output_spread=math.nan),) if step % 20 == 5 else (),
                grad_cosine=step / 60 if step % 10 in (0, 3) else None,
            )

    def test_is_the_history_of_the_run(self, tmp_path):
        steps = list(self.full_records())
        read = TrainingHistory.from_jsonl(write(tmp_path / "run.jsonl", steps, tensors_every=1))
        assert json.dumps(read.state_dict()) == json.dumps(history_of(steps).state_dict())
        assert read.last == steps[-1]

    def test_without_tables_the_totals_and_names_of_bad_tensors_are_there(self, tmp_path):
        steps = list(self.full_records())
        read = TrainingHistory.from_jsonl(write(tmp_path / "run.jsonl", steps, tensors_every=0))
        whole = history_of(steps)
        assert read.grad_norm[:40] == pytest.approx(whole.grad_norm[:40]) and math.isnan(read.grad_norm[40])
        assert read.first_events == whole.first_events
        assert len(read.tensors) == 0 and read.num_steps == 60

    def test_logs_by_hand(self, tmp_path):
        bad = '{"step":1,"loss":"NaN","grad/norm":"NaN","nonfinite":["x"]}'
        lines = ['{"step":0,"loss":2.0}', bad, "", '{"step":2}']
        (tmp_path / "run.jsonl").write_text("\n".join(lines))
        read = TrainingHistory.from_jsonl(tmp_path / "run.jsonl", window=8)
        assert (read.num_steps, read.num_nonfinite, read.window) == (3, 1, 8)
        assert read.first_events[0].names == ("x",)
