"""Trainings whose sinks cannot write, are slow, or raise: the training is unaffected, and each loss is counted.

    python -m benchmarks.reliability.disks             # half a minute; results/reliability-disks.json

Each case trains the same small model to the same parameters, bit for bit, as without a guard; what is in the log and
what the guard counts as lost are together all the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fastguard
from benchmarks.reliability.saving import finish
from fastguard.sinks import jsonl, read_jsonl

RESULTS = Path(__file__).resolve().parents[1] / "results" / "reliability-disks.json"
NUM_STEPS = 300
NOBODY = 65534


class WrongError(Exception):
    """A case that came out wrong."""


class CannotRunError(Exception):
    """A case that this machine does not allow."""


def _train(sinks: list[Any] | None, each: Callable[[int], None] = lambda step: None) -> tuple[list[torch.Tensor], Any]:
    """The parameters after the training, and the guard; `each` is called before each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if sinks is not None:
        fastguard.wrap(optimizer, model, sinks=sinks)
    for step in range(NUM_STEPS):
        each(step)
        loss = model(torch.randn(5, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    parameters = [p.detach().clone() for p in model.parameters()]
    return parameters, None if sinks is None else optimizer.guard  # type: ignore[attr-defined]


def _steps(path: Path) -> list[int]:
    return [line["step"] for line in read_jsonl(path)]


def _guarded(sinks: list[Any], each: Callable[[int], None] = lambda step: None) -> dict[str, int]:
    """Trains under guard; how many records each sink lost.

    Raises:
        WrongError: other parameters than without the guard.
    """
    plain, _ = _train(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        parameters, guard = _train(sinks, each)
        guard.close()
    if not all(map(torch.equal, parameters, plain)):
        raise WrongError("the parameters are not those of a training without a guard")
    lost: dict[str, int] = guard._ledger.lost()
    if guard.report().numbers["num_records_lost"] != sum(lost.values()):
        raise WrongError("the report does not say how many records were lost")
    return lost


def _expect(is_so: bool, what: str) -> None:
    if not is_so:
        raise WrongError(what)


def _accounted_for(steps: list[int], num_lost: int) -> None:
    _expect(steps == sorted(set(steps)), "a step is in the log twice, or in the wrong place")
    _expect(len(steps) + num_lost == NUM_STEPS, f"{len(steps)} steps in the log, {num_lost} lost, of {NUM_STEPS}")


def full_device(folder: Path) -> int:
    """A device that is always full."""
    lost = sum(_guarded([fastguard.JsonlSink("/dev/full")]).values())
    _expect(lost == NUM_STEPS, f"{lost} records lost")
    return lost


def full_file_system(folder: Path) -> int:
    """A file system that fills up, and has room again after two hundred steps."""
    mounted = folder / "mounted"
    mounted.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", mounted], capture_output=True, text=True)
    if made.returncode:
        raise CannotRunError(f"no file system can be mounted: {made.stderr.strip()}")
    try:
        ballast = mounted / "ballast"
        ballast.write_bytes(bytes(32 << 10))

        def each(step: int) -> None:
            if step == 200:
                ballast.unlink()

        lost = sum(_guarded([fastguard.JsonlSink(mounted / "run.jsonl", tensors_every=0)], each).values())
        steps = _steps(mounted / "run.jsonl")
        _expect(0 < lost < NUM_STEPS and max(steps) > 200, f"{lost} records lost")
        _accounted_for(steps, lost)
        return lost
    finally:
        subprocess.run(["umount", mounted], check=True)


def limited_file_size(folder: Path) -> int:
    """RLIMIT_FSIZE, lifted after two hundred steps."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def each(step: int) -> None:
        if step in (100, 200):
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]) if step == 100 else before)

    try:
        lost = sum(_guarded([fastguard.JsonlSink(folder / "run.jsonl", tensors_every=0)], each).values())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    _expect(0 < lost < 101, f"{lost} records lost")
    _accounted_for(_steps(folder / "run.jsonl"), lost)
    return lost


def read_only_folder(folder: Path) -> int:
    """A folder that may not be written to: refused when the sink is made; once it is open, the log goes on."""
    place = folder / "place"
    place.mkdir(mode=0o777)
    for above in (folder, folder.parent):
        os.chmod(above, 0o755)
    with _unprivileged(place):
        path = place / "run.jsonl"

        def each(step: int) -> None:
            if step == 100:
                os.chmod(place, 0o555)

        lost = sum(_guarded([fastguard.JsonlSink(path)], each).values())
        try:
            fastguard.JsonlSink(place / "another.jsonl")
        except PermissionError:
            pass
        else:
            raise WrongError("a log was made in a folder that may not be written to")
        _accounted_for(_steps(path), lost)
        os.chmod(place, 0o755)
    return lost


@contextlib.contextmanager
def _unprivileged(place: Path) -> Iterator[None]:
    """As a user who may not do everything; `place` is then that user's."""
    if os.geteuid():
        yield
        return
    os.chown(place, NOBODY, -1)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def deleted_file(folder: Path) -> int:
    """A file that is deleted four times: what was written after it was last seen is in the next one."""
    path, seen = folder / "run.jsonl", set()

    def each(step: int) -> None:
        if step % 60 == 50:
            seen.update(_steps(path))
            path.unlink()
            time.sleep(jsonl.LOOK_EVERY_S)

    lost = sum(_guarded([fastguard.JsonlSink(path)], each).values())
    _accounted_for(sorted(seen.union(_steps(path))), lost)
    _expect(bool(read_jsonl(path).model), "the new file does not say what is known of the model")
    return lost


def rotated_file(folder: Path) -> int:
    """A file that is moved away four times, as log rotation does."""
    path, steps = folder / "run.jsonl", []

    def each(step: int) -> None:
        if step % 60 == 50:
            path.rename(folder / f"run.jsonl.{step:03}")
            time.sleep(jsonl.LOOK_EVERY_S)  # else it may be moved away again before there is a new one

    lost = sum(_guarded([fastguard.JsonlSink(path)], each).values())
    for part in [*sorted(folder.glob("run.jsonl.*")), path]:
        steps += _steps(part)
    _accounted_for(steps, lost)
    return lost


def folder_gone(folder: Path) -> int:
    """A folder that is deleted, with a file in its place for a while."""
    place = folder / "runs"

    def each(step: int) -> None:
        if step == 100:
            shutil.rmtree(place)
            place.touch()
            time.sleep(jsonl.LOOK_EVERY_S)
        elif step == 200:
            place.unlink()

    lost = sum(_guarded([fastguard.JsonlSink(place / "run.jsonl")], each).values())
    steps = _steps(place / "run.jsonl")
    _expect(set(range(200, NUM_STEPS)) <= set(steps), "steps are missing after the folder could be made again")
    _expect(90 < lost <= 101, f"{lost} records lost")
    return lost


def three_writers(folder: Path) -> int:
    """Three trainings that start at once with one path: each gets a file of its own."""
    path = folder / "run.jsonl"
    children = []
    for _ in range(3):
        child = os.fork()
        if not child:
            code = 1
            try:
                code = sum(_guarded([fastguard.JsonlSink(path, tensors_every=20)]).values())
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    _expect(codes == [0, 0, 0], f"the trainings ended with {codes}")
    for name in ("run", "run-2", "run-3"):
        log = read_jsonl(folder / f"{name}.jsonl")
        steps = [line["step"] for line in log]
        _expect(not log.num_skipped and steps == [*range(NUM_STEPS)], "lines are missing, cut off or mixed up")
    return 0


def fifo_nobody_reads(folder: Path) -> int:
    """A FIFO without a reader is refused; one whose reader stops reading takes what it can, and nobody waits."""
    os.mkfifo(folder / "fifo")
    try:
        fastguard.JsonlSink(folder / "fifo")
    except OSError as error:
        _expect(error.errno == errno.ENXIO, f"refused with {error}")
    else:
        raise WrongError("a FIFO that nobody reads was taken")
    reader = os.open(folder / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        lost = sum(_guarded([fastguard.JsonlSink(folder / "fifo", tensors_every=0)]).values())
        (folder / "read.jsonl").write_bytes(os.read(reader, 1 << 20))
    finally:
        os.close(reader)
    _accounted_for(_steps(folder / "read.jsonl"), lost)
    return lost


def raising_sinks(folder: Path) -> int:
    """Sinks that raise at some steps, between two that do not."""

    def raising(record: fastguard.StepStats) -> None:
        if record.step % 3 == 0:
            raise ValueError("every third")

    def always(record: fastguard.StepStats) -> None:
        raise MemoryError

    log, memory = fastguard.JsonlSink(folder / "run.jsonl"), fastguard.MemorySink()
    lost = _guarded([log, raising, always, memory])
    _expect(sorted(lost.values()) == [NUM_STEPS // 3, NUM_STEPS], f"lost: {lost}")
    _accounted_for(_steps(folder / "run.jsonl"), 0)
    _accounted_for(memory.series("step"), 0)
    return sum(lost.values())


def slow_sink(folder: Path) -> int:
    """A sink on which the training waits: it is told of once, by name."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fastguard")
    logger.addHandler(handler)

    def slow(record: fastguard.StepStats) -> None:
        time.sleep(0.01)

    try:
        lost = sum(_guarded([slow, fastguard.JsonlSink(folder / "run.jsonl")]).values())
    finally:
        logger.removeHandler(handler)
    named = [text for text in told if "slow_sink" in text and "training waits for it" in text]
    _expect(len(named) == 1, f"told: {told}")
    _accounted_for(_steps(folder / "run.jsonl"), lost)
    return lost


CASES: tuple[Callable[[Path], int], ...] = (
    *(full_device, full_file_system, limited_file_size, read_only_folder, deleted_file, rotated_file, folder_gone),
    *(three_writers, fifo_nobody_reads, raising_sinks, slow_sink),
)


def run(folder: Path) -> dict[str, Any]:
    """What came of each case: the records that were lost, all of them counted, or why it could not be run."""
    figures: dict[str, Any] = {"number": 0, "num_wrong": 0, "num_not_run": 0, "lost": {}, "failed": [], "not_run": []}
    for case in CASES:
        name = case.__name__
        (folder / name).mkdir()
        figures["number"] += 1
        try:
            figures["lost"][name] = case(folder / name)
        except CannotRunError as error:
            figures["number"] -= 1
            figures["num_not_run"] += 1
            figures["not_run"].append(f"{name}: {error}")
        except Exception as error:
            figures["num_wrong"] += 1
            figures["failed"].append(f"{name}: {type(error).__name__}: {error}")
    return figures


def main() -> int:
    """The command line: prints the figures, and saves them; 1 if a case came out wrong."""
    parser = argparse.ArgumentParser("python -m benchmarks.reliability.disks", description=__doc__.partition("\n")[0])
    parser.add_argument("--dry", action="store_true", help="save nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("fastguard").addHandler(logging.NullHandler())
    logging.getLogger("fastguard").propagate = False
    with tempfile.TemporaryDirectory() as folder:
        figures = run(Path(folder))
    return finish(figures, RESULTS, dry=arguments.dry)


if __name__ == "__main__":
    sys.exit(main())
