"""Runs a script again and again for a few hundred steps, each time with one thing changed, and compares the losses.

Each run is a process (`fastguard.commands.trial_child`) in a copy of the working folder, and can write nowhere else.
Two runs as it is, with different seeds, show how large a difference means nothing. Then come the arms that the first
run's causes suggest, then all others. The arm that helps most is run again with the second seed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..diagnosis import diagnose, find_causes
from ..errors import FastguardError
from ..records import TrainingHistory
from ..records.log import read_jsonl
from . import forked
from .arms import ARMS, Arm, arms_for
from .paired import NOT_TRIED, Outcome, Row, Run, confirm, judged, may_help, noise_between

LEAST_STEPS = 16  # of the base
_WAIT_S = 0.25
_MOST_CONFIRMED = 3  # arms that are run with the second seed
_MOST_FILE_BYTES = 8 << 30
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TRITON_CACHE_DIR")  # variables with folders that runs may change
_OFFLINE = {
    "WANDB_MODE": "offline",
    "NEPTUNE_MODE": "offline",
    "COMET_OFFLINE": "1",
    "CLEARML_OFFLINE_MODE": "1",
    "MLFLOW_TRACKING_URI": "mlruns",
    "TRACKIO_DIR": "trackio",
    "MPLBACKEND": "Agg",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
}


class TrialError(FastguardError):
    """The script cannot be tried: it took too few steps, or failed."""


@dataclass(frozen=True)
class Task:
    target: str  # the script, or a module if `is_module`
    arguments: tuple[str, ...]  # of the script
    is_module: bool
    arm: str  # name of the arm; empty for none
    seed: int  # added to every seed that the script sets; also that of a script that sets none
    num_steps: int  # steps after which the process ends
    log: str  # where the guard writes
    base_log: str  # that of the run without an arm, which tells arms what they need to know; empty for none
    progress: int  # file descriptor that gets a line for each step


class Trial:
    """Tries a script, or a module if `is_module`, in `seconds` for everything; the arms `names`, or all that apply.

    `told` is called with the name of a run and the number of its steps so far; 0 when it begins.
    """

    def __init__(
        self,
        target: str,
        arguments: Sequence[str] = (),
        *,
        is_module: bool = False,
        num_steps: int = 300,
        seconds: float = math.inf,
        names: Sequence[str] | None = None,
        told: Callable[[str, int], None] = lambda name, step: None,
    ) -> None:
        self._target, self._arguments, self._is_module = target, tuple(arguments), is_module
        self._num_steps, self._names, self._told = num_steps, names, told
        self._ends_at = time.monotonic() + seconds
        self._reasons: dict[str, str] = {}  # why arms do not apply, by the base

    def run(self) -> Outcome:
        """Runs everything. Raises TrialError if the script as it is took fewer than 16 steps, OSError if it cannot."""
        with tempfile.TemporaryDirectory(prefix="fastguard-try-") as room:
            self._room = Path(room).resolve()
            base = self._run("as it is", "", 0)
            if len(base.losses) < LEAST_STEPS:
                why = base.problem or "it ended"
                raise TrialError(f"the script took {len(base.losses)} steps with a known loss, of at least 16: {why}")
            history = TrainingHistory.from_jsonl(self._log_of("", 0))
            causes = find_causes(diagnose(history), history)
            other = self._run("as it is, second seed", "", 1)
            outcome = Outcome(base, other, noise_between(base.losses, other.losses), causes, [])
            arms = [*arms_for(one.rule for one in causes), *ARMS.values()]
            for arm in dict.fromkeys(arms if self._names is None else map(ARMS.__getitem__, self._names)):
                outcome.rows.append(self._row(arm, outcome))
            self._confirm(outcome)
            return outcome

    def _row(self, arm: Arm, outcome: Outcome) -> Row:
        base = outcome.base
        reason = self._reasons.get(arm.name, "")
        if not reason and arm.by_validation and len(base.val_losses) < 2:
            reason = "only validation losses can tell, and the script computed fewer than two in these steps"
        if not reason and time.monotonic() + 1.1 * base.seconds > self._ends_at:
            reason = "no time left"
        if reason:
            return Row(arm, Run(problem=reason), NOT_TRIED, why=reason)
        run = self._run(arm.name, arm.name, 0)
        if not run.losses:
            return Row(arm, run, NOT_TRIED, why=run.problem or "it took no step")
        return judged(arm, run, base, outcome.other, outcome.noise)

    def _confirm(self, outcome: Outcome) -> None:
        """Runs what may help with the second seed as well, most promising first, until something helps with both."""
        base, other, noise = outcome.base, outcome.other, outcome.noise
        promising = [row for row in outcome.rows if may_help(row, noise)]
        promising.sort(key=outcome.promise)
        for row in promising[: -_MOST_CONFIRMED - 1 : -1]:
            if time.monotonic() + 1.1 * base.seconds > self._ends_at:
                row.why = row.why or "with one seed: no time left for the second"
                return
            second = self._run(f"{row.arm.name}, second seed", row.arm.name, 1)
            again = judged(row.arm, second, other, base, noise)
            if confirm(row, again, noise):
                break

    def _log_of(self, arm: str, seed: int) -> Path:
        return self._room / f"{arm.replace(' ', '-') or 'base'}-{seed}.jsonl"

    def _run(self, name: str, arm: str, seed: int) -> Run:
        """One process, in a copy of the folder that is deleted afterwards."""
        self._told(name, 0)
        started = time.monotonic()
        folder, here, target = self._room / "copy", Path.cwd(), self._target
        forked.mirror(here, folder / "here")
        if not self._is_module:
            script = Path(target).resolve()
            if script.is_relative_to(here):
                target = str(script.relative_to(here))
            else:
                forked.mirror(script.parent, folder / "script")
                target = str(folder / "script" / script.name)
        read, write = os.pipe()
        log, base_log = self._log_of(arm, seed), self._log_of("", 0)
        arguments = tuple(one.replace(str(here), str(folder / "here")) for one in self._arguments)
        known = "" if base_log == log else str(base_log)
        task = Task(target, arguments, self._is_module, arm, seed, self._num_steps, str(log), known, write)
        output, temporary = folder / "output.txt", folder / "tmp"
        temporary.mkdir()
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(Path(__file__).resolve().parents[2]))))
        own = {"TMPDIR": str(temporary), "MPLCONFIGDIR": str(temporary), "PYTHONPATH": path}
        try:
            with open(output, "wb") as file:
                process = subprocess.Popen(
                    [sys.executable, "-m", "fastguard.commands.trial_child", json.dumps(asdict(task))],
                    cwd=folder / "here",
                    env={**os.environ, **_OFFLINE, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    pass_fds=(write,),
                    start_new_session=True,
                    preexec_fn=lambda: _confine(self._room),
                )
            os.close(write)
            try:
                said, is_late = self._follow(read, process, name)
            finally:  # with everything that it has started: it has said all that it has to say
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            run = _run_of(log, self._num_steps)
            run.seconds = time.monotonic() - started
            with open(output, "rb") as file:
                file.seek(max(0, os.path.getsize(output) - 4096))
                lines = file.read().decode(errors="replace").strip().splitlines()
            last = lines[-1] if lines else "it was killed"  # of an exception, its message
            run.problem = "the time was over" if is_late else said.get("problem", last)
            if not known:
                self._reasons = said.get("reasons", {})
            return run
        finally:
            os.close(read)
            shutil.rmtree(folder, ignore_errors=True)

    def _follow(self, read: int, process: subprocess.Popen[bytes], name: str) -> tuple[dict[str, Any], bool]:
        """Reads what the process says until it ends: its last words, and whether the time was over before."""
        rest = b""
        while process.poll() is None or select.select([read], [], [], 0.0)[0]:
            if time.monotonic() > self._ends_at:
                return {}, True
            if not select.select([read], [], [], _WAIT_S)[0]:
                continue
            piece = os.read(read, 1 << 16)
            if not piece:
                break
            *lines, rest = (rest + piece).split(b"\n")
            steps = [line for line in lines if line.isdigit()]
            if steps:
                self._told(name, int(steps[-1]))
            if len(steps) < len(lines):
                return json.loads(lines[-1]), False
        return {}, False


def _confine(room: Path) -> None:
    """In the process, before it becomes Python."""
    import resource

    forked.die_with_parent()
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    limit = _MOST_FILE_BYTES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILE_BYTES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    caches = [Path.home() / name for name in (".cache", ".triton", ".nv")]
    caches += [Path(os.environ[name]) for name in _CACHES if os.environ.get(name)]
    forked.refuse_writes([room, "/dev", "/proc", *caches])  # CUDA names its threads through /proc


def _run_of(log: Path, num_steps: int) -> Run:
    """What the guard wrote of a run."""
    run = Run()
    with contextlib.suppress(FileNotFoundError):
        for record in read_jsonl(log)[:num_steps]:
            if record.get("val_loss") is not None:
                run.val_losses[record["step"]] = record["val_loss"]
            if record.get("loss") is not None:
                run.losses.append(record["loss"])
    return run
