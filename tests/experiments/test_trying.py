"""`fastguard try`: what it says of runs, and that the runs leave the user's files alone."""

import functools
import io
import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from fastguard.commands import trying
from fastguard.commands.cli import main
from fastguard.diagnosis import Finding
from fastguard.experiments import ARMS, compare, noise_between, paired
from fastguard.experiments.forked import landlock_version
from fastguard.experiments.paired import NOT_TRIED, Outcome, Row, Run, judged


def losses(level, n=60):
    return [level + 0.01 * (-1) ** i for i in range(n)]


BASE, OTHER = Run(losses(1.0), {29: 1.2, 59: 1.1}), Run(losses(1.05), {29: 1.22, 59: 1.12})


def row(name, level, val=None, noise=0.05):
    return judged(ARMS[name], Run(losses(level), {} if val is None else {29: val, 59: val}), BASE, OTHER, noise)


def outcome(*rows, causes=()):
    return Outcome(BASE, OTHER, 0.05, [Finding("s.", rule=name, confidence=0.9) for name in causes], list(rows))


def test_a_change_helps_if_it_does_more_than_another_seed_and_the_validation_loss_agrees():
    assert row("lr x10", 0.7).verdict == "helps" and row("lr x10", 1.3).verdict == "harms"
    assert row("lr x10", 0.95).verdict == "no difference"
    worse = row("lr x10", 0.7, val=2.0)
    assert worse.verdict == "harms" and worse.why == "the training loss is lower, the validation loss higher"
    assert row("no dropout", 0.5, val=1.1).verdict == "no difference"  # whatever the training loss is
    assert row("no dropout", 1.5, val=0.5).verdict == "helps" and row("no dropout", 0.5).verdict == "not known"
    assert row("lr x10", 0.7, val=math.nan).verdict == "harms"
    assert row("inputs permuted", 1.02).verdict == "harms"  # a clear difference, if a small one, clears the targets


def test_the_first_line_says_what_to_change():
    helps, more = row("lr x10", 0.7), row("warm-up", 0.5)
    assert trying.verdict_of(outcome(helps, more)).startswith(
        "Raise the learning rate linearly over the first steps. The training loss is 0.5 lower then (0.4 to 0.6"
    )
    both = outcome(helps, more, causes=["learning-rate-too-low"])
    assert trying.verdict_of(both).startswith(
        "Multiply the learning rate by 10."
    )  # the remedy of a cause that was found
    told = trying.verdict_of(outcome(row("lr x10", 1.0)))
    assert told == "No change helps: none of 1 lowers the loss by more than the noise between seeds, 0.05."
    diverged = judged(ARMS["lr x0.1"], Run(losses(1.0)), Run([*losses(1.0, 20), math.nan] * 2), OTHER, 0.05)
    assert "stays finite; without, it does not" in trying.verdict_of(outcome(diverged))


def test_a_smaller_difference_helps_if_two_seeds_agree():
    def small(level):
        return judged(ARMS["lr x10"], Run(losses(level)), BASE, OTHER, 0.05)

    assert small(0.93).verdict == "no difference" and paired.may_help(small(0.93), 0.05)
    assert not paired.may_help(small(0.97), 0.05) and not paired.may_help(row("inputs permuted", 0.5), 0.05)
    agreed, parted = small(0.93), small(0.93)
    assert paired.confirm(agreed, small(0.92), 0.05) and (agreed.verdict, agreed.num_seeds) == ("helps", 2)
    assert agreed.comparison.effect == pytest.approx(0.075, abs=1e-3)
    assert not paired.confirm(parted, small(0.99), 0.05) and parted.verdict == "no difference"
    assert parted.why == "with the second seed: no difference"


def test_runs_that_lie_far_apart_do_not_hide_a_large_difference():
    far = Run(losses(5.0))

    def halved(level, base, other):
        return judged(ARMS["lr x10"], Run(losses(level)), base, other, 4.0)

    for level, is_sure in ((2.5, True), (4.7, False)):
        first = halved(0.5, BASE, far)
        assert first.verdict == "no difference" and paired.may_help(first, 4.0)
        assert paired.confirm(first, halved(level, far, BASE), 4.0) is is_sure
        assert first.verdict == ("helps" if is_sure else "no difference")


def test_the_null_arm_accuses_only_if_nothing_else_explains_it():
    same = row("inputs permuted", 1.0)
    assert outcome(row("lr x10", 1.0), same).accusation is same
    assert "do not seem to belong together" in trying.verdict_of(outcome(row("lr x10", 1.0), same))
    assert outcome(row("lr x10", 1.0), same, causes=["wrong-targets"]).accusation is same
    assert outcome(row("lr x10", 0.5), same).accusation is None  # it learns with a higher rate
    assert outcome(same).accusation is None
    assert outcome(row("lr x10", 1.0), same, causes=["vanishing-gradients"]).accusation is None


def test_table_notes_and_page(tmp_path):
    left_out = Row(
        ARMS["no dropout"], Run(problem="no module drops anything"), NOT_TRIED, why="no module drops anything"
    )
    odd = row("lr x10", 0.7)
    odd.run.losses[40:] = [math.inf] * 20
    found = outcome(odd, left_out, causes=["learning-rate-too-low"])
    rows, notes = trying.rows_of(found), trying.notes_of(found)
    assert [one[0] for one in rows] == ["change", "as it is", "as it is, second seed", "lr x10"]
    assert rows[1][1:3] == ("0.9998", "1.1")
    assert "learning-rate-too-low (0.90)" in notes[0] and "no dropout (no module drops anything)" in notes[1]
    path = tmp_path / "runs" / "page.html"
    trying.write_page("<b>first</b> line", rows, notes, path, "train.py")
    page = path.read_text()
    assert "&lt;b&gt;first" in page and "<script" not in page
    json.dumps(trying.to_dict(found))


def test_progress_is_a_bar_on_a_terminal_and_a_line_elsewhere():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, shown in ((Terminal(), "[############            ] 50/100"), (io.StringIO(), "fastguard try: lr x10")):
        progress = trying._Progress(stream, 100)
        progress.tell("lr x10", 0)
        progress._drawn_at = -math.inf
        progress.tell("lr x10", 50)
        progress.end()
        assert shown in stream.getvalue()
        assert stream.isatty() or stream.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there must be a script"),
        (["missing.py"], "there is no script 'missing.py'"),
        (["--arms", "lr x11", __file__], "Did you mean `lr x10`?"),
        (["--steps", "3", __file__], "`--steps` must be at least 16, got 3"),
        (["--stepz", "3"], "Did you mean `--steps`?"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["try", *arguments])
    assert ended.value.code == 64 and message in capsys.readouterr().err


def test_arguments_of_the_script_are_its_own(capsys):
    for line, options, script in (
        ("--steps 5 -m a.b --steps 7", "--steps 5 -m", "a.b --steps 7"),
        ("a.py 3 --steps 7 --json", "--json --steps 7", "a.py 3"),
        ("-m a.b --minutes 2", "-m --minutes 2", "a.b"),
        ("a.py -- 3 --steps 7", "", "a.py 3 --steps 7"),
        ("a.py --steps", "", "a.py --steps"),
    ):
        assert trying.split(line.split()) == (options.split(), script.split())
    assert main(["try", "--list"]) == 0
    assert "lr x10" in capsys.readouterr().out


SCRIPT = """
import os, sys, torch
from torch import nn
from helper import data

torch.manual_seed(0)
x, y = data()
with open("/proc/self/comm", "w") as file:  # as CUDA names its threads
    file.write("script")
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
loss_fn = nn.CrossEntropyLoss()
torch.save(model.state_dict(), "best.pt")
os.makedirs("out", exist_ok=True)
for step in range(100):
    rows = torch.randint(1000, (32,))
    loss = loss_fn(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
    with open("out/log.txt", "a") as file:
        file.write("x")
    if len(sys.argv) > 2 and step == 5:
        open(sys.argv[2], "w")
"""
HELPER = """
import torch

def data():
    x = torch.randn(1000, 10)
    return x, (x @ torch.randn(10, 3)).argmax(1)
"""
needs_landlock = pytest.mark.skipif(not landlock_version(), reason="the kernel has no Landlock")


def project(folder):
    (folder / "train.py").write_text(SCRIPT)
    (folder / "helper.py").write_text(HELPER)
    (folder / "best.pt").write_text("precious")
    (folder / "out").mkdir()
    (folder / "out" / "log.txt").write_text("old")
    return {path: path.read_bytes() for path in folder.rglob("*.*")}


def try_it(folder, *arguments):
    command = [sys.executable, "-m", "fastguard", "try", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
@needs_landlock
def test_a_rate_that_is_too_low_is_found_and_no_file_is_touched(tmp_path):
    before = project(tmp_path)
    done = try_it(tmp_path, "--steps", "60", "--arms", "lr x10,no dropout", "--json", "train.py", "0.001")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["advice"] == "lr x10" and "learning rate by 10" in found["verdict"]
    raised, dropout = found["arms"]
    assert (raised["verdict"], raised["num_seeds"], raised["num_steps"]) == ("helps", 2, 60)
    assert (dropout["verdict"], dropout["why"]) == ("not tried", "no module drops anything")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before


@pytest.mark.slow
@needs_landlock
def test_ctrl_c_ends_all_runs(tmp_path):
    project(tmp_path)
    script = (tmp_path / "train.py").read_text().replace("range(100)", "range(10**9)")
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "fastguard", "try", "--steps", "1000000", "train.py", "0.001"]
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a background job ignores
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    assert "as it is ..." in process.stderr.readline()
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/cwd/train.py") as file:
                assert "10**9" not in file.read()  # no run of this test is left
        except OSError:
            continue


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("base", "arm", "verdict"),
    [
        ([1.0] * 40, [1.0] * 40, "no difference"),
        ([100.0] * 40, [99.0, 98.9] * 20, "no difference"),  # sure, but one percent
        ([1.0, 2.0] * 20, [2.0, 1.0] * 20, "no difference"),  # large, but not sure
        ([1.0] * 7, [0.5] * 7, "not known"),
        ([], [], "not known"),
        ([1.0] * 40, [0.5] * 40, "helps"),  # a constant difference has no deviation
        ([1.0] * 40, [1.0] * 20 + [NAN] * 20, "harms"),
        ([1.0] * 5 + [INF], [1.0] * 40, "helps"),
        ([1.0] * 20 + [NAN], [1.0] * 20 + [NAN], "no difference"),  # both diverge at the same step
        ([NAN], [NAN], "not known"),
        ([1.0] * 40, [1.0] * 30, "no difference"),  # an arm that ended early has not diverged
    ],
)
def test_verdicts(base, arm, verdict):
    assert compare(base, arm).verdict == verdict


def test_a_difference_counts_from_twice_that_between_seeds_on():
    base, arm = [1.0, 1.1] * 20, [0.99, 1.08] * 20
    assert compare(base, arm).verdict == "no difference"  # 1.5 %
    assert compare(base, arm, noise=0.005).verdict == "helps" and compare(base, arm, noise=0.01).verdict != "helps"
    assert compare(base, arm, noise=0.005).error > 0.005
    other = [x + 0.2 * (-1) ** (i // 5) for i, x in enumerate(base)]  # no difference on the whole
    assert noise_between(base, other) == pytest.approx(0.2) and noise_between([], []) == 0.0


def test_a_small_harm_of_the_null_arm_is_one_too():
    base, arm = [100.0] * 400, [100.0 + 0.5 * (i % 5 - 1) for i in range(400)]  # t = -12.2, half a percent
    assert compare(base, arm).verdict == "no difference" and compare(base, arm, is_null=True).verdict == "harms"
    weak = [100.0 + 0.5 * (i % 5 - 1.5) for i in range(400)]  # t = -6.1, of 0.4 sqrt(300) = 6.9
    assert compare(base, weak, is_null=True).verdict == "no difference"
