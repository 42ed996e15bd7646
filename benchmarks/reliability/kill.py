"""Trainings that kill -9, SIGTERM or Ctrl-C ends or interrupts at random moments, and what is then in their two logs.

    python -m benchmarks.reliability.kill                # 500 of each; results/reliability-kill.json
    python -m benchmarks.reliability.kill --number 10 --dry

Each training is a process that was forked from this one, so that torch is imported once. It tells through shared memory
how many steps it has taken. After kill -9 a log may be a step behind, and end in a line that is cut off; after SIGTERM
nothing may be missing. After Ctrl-C, which comes out of the training wherever it is, parameters and gradients must be
those from before or from after the step, and the training goes on, five times each.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import fastguard
from benchmarks.reliability.saving import finish
from fastguard.sinks import read_jsonl

RESULTS = Path(__file__).resolve().parents[1] / "results" / "reliability-kill.json"
NUM_INTERRUPTS = 5  # of one training
MAX_WAIT_S = 0.03
LR = 0.01
# What a training tells: whether it has begun, steps that it has taken, what was not as it should be, records that the
# sinks say they lost, interrupts that came.
_BEGUN, _TAKEN, _WRONG, _LOST, _INTERRUPTS = range(5)


class Board:
    """Numbers that a training tells this process."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 64)

    def __getitem__(self, place: int) -> int:
        return struct.unpack_from("q", self._memory, 8 * place)[0]

    def __setitem__(self, place: int, number: int) -> None:
        struct.pack_into("q", self._memory, 8 * place, number)


class RecordLog(fastguard.JsonlSink):
    """A log that is given records, where the other takes lines."""

    def write(self, record: fastguard.StepStats) -> None:
        super().write(record)


class Training:
    """A small training under guard whose every step can be checked: plain SGD on gradients from a generator."""

    def __init__(self, folder: Path, board: Board, seed: int) -> None:
        self.board = board
        self.generator = torch.Generator().manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
        self.parameters = list(self.model.parameters())
        optimizer = torch.optim.SGD(self.parameters, lr=LR, foreach=False)
        sinks = [fastguard.JsonlSink(folder / "a.jsonl", tensors_every=7), RecordLog(folder / "b.jsonl")]
        self.optimizer = fastguard.wrap(optimizer, self.model, max_norm=6.0, sinks=sinks)
        self.guard = self.optimizer.guard
        self.number = 0
        self.is_late = False

    def prepare(self) -> None:
        """Makes gradients; each thirteenth step gets one that is not finite."""
        self.number += 1
        for p in self.parameters:
            p.grad = torch.randn(p.shape, generator=self.generator)
        if self.number % 13 == 0:
            self.parameters[1].grad[0] = math.nan

    def step(self) -> None:
        self.optimizer.step()
        self.guard.observe(loss=1.0 / self.number)
        self.board[_TAKEN] += 1

    def run_until_it_ends(self) -> None:
        """Goes on until something ends the process."""
        self.board[_BEGUN] = 1
        while True:
            self.prepare()
            self.step()

    def run_through_interrupts(self) -> None:
        """Goes on until so many interrupts have come, and some steps after."""
        signal.signal(signal.SIGINT, self._on_ctrl_c)
        num_left = math.inf
        while num_left > 0:
            self.prepare()
            kept = [(p, p.grad, p.grad.clone(), p.detach().clone()) for p in self.parameters]
            try:
                self.board[_BEGUN] = 1
                if self.is_late:
                    raise KeyboardInterrupt
                self.step()
                self.board[_BEGUN] = 0
            except KeyboardInterrupt:
                self.board[_BEGUN], self.is_late = 0, False
                self.board[_WRONG] += not _is_intact(kept)
                self.board[_INTERRUPTS] += 1
                if self.board[_INTERRUPTS] == NUM_INTERRUPTS:
                    num_left = 30.0
            num_left -= 1.0
        self.guard.close()
        self.board[_LOST] = sum(self.guard._ledger.lost().values())
        self.board[_TAKEN] = self.guard._run.step
        self.board[_WRONG] += self.guard.history.num_steps != self.guard._run.step

    def _on_ctrl_c(self, number: int, frame: Any) -> None:
        """As Python's own handler, but for what comes while the step is prepared or looked at."""
        if self.board[_BEGUN]:
            raise KeyboardInterrupt
        self.is_late = True


def _is_intact(kept: list[tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]]) -> bool:
    """Whether each gradient is there, as it was or clipped, and each parameter as it was, or a step further."""
    for p, gradient, before, parameter in kept:
        if p.grad is not gradient:
            return False
        finite = before.isfinite()
        ratio = gradient[finite] / before[finite]
        if ratio.numel() and not (ratio.max() <= 1.0 and ratio.max() - ratio.min() < 1e-5):
            return False
        if not (torch.equal(p.detach(), parameter) or torch.equal(p.detach(), parameter.add(gradient, alpha=-LR))):
            return False
    return True


class Found(NamedTuple):
    """What was in the logs of a training.

    Attributes:
        unreadable: logs that could not be read, or with steps out of order or twice.
        cut_off: lines that were.
        behind: steps taken that the shorter log lacks; `silent` of them were not counted as lost.
        apart: how many more steps are in one log than in the other, but for what counts as lost.
        wrong: checks that failed in the training itself; the wrong way of ending is one.
    """

    unreadable: int
    cut_off: int
    behind: int
    silent: int
    apart: int
    wrong: int


def _look(folder: Path, board: Board, wrong: int) -> Found:
    unreadable, cut_off, lengths = 0, 0, []
    for name in ("a.jsonl", "b.jsonl"):
        try:
            log = read_jsonl(folder / name)
        except (OSError, ValueError):
            unreadable += 1
            continue
        steps = [line["step"] for line in log]
        unreadable += steps != sorted(set(steps)) or (not board[_LOST] and steps != list(range(len(steps))))
        cut_off += log.num_skipped
        lengths.append(len(steps))
    behind = max(0, board[_TAKEN] - min(lengths, default=0))
    apart = max(0, max(lengths, default=0) - min(lengths, default=0) - board[_LOST])
    return Found(unreadable, cut_off, behind, max(0, behind - board[_LOST]), apart, wrong + board[_WRONG])


def _try(number: int, folder: Path, seed: int) -> Found:
    """One training that gets the signal of that number."""
    rng, board = random.Random(seed), Board()
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            logging.getLogger("fastguard").setLevel(logging.CRITICAL)
            training = Training(folder, board, seed)
            (training.run_through_interrupts if number == signal.SIGINT else training.run_until_it_ends)()
            os._exit(0)
        finally:
            os._exit(9)
    num_sent = 0
    while num_sent < (NUM_INTERRUPTS if number == signal.SIGINT else 1) and not _has_ended(child):
        _wait_for(child, board)
        time.sleep(rng.uniform(0.0, MAX_WAIT_S))
        if number == signal.SIGINT and not board[_BEGUN]:
            continue  # not while the harness itself looks at something
        os.kill(child, number)
        num_sent += 1
        while number == signal.SIGINT and board[_INTERRUPTS] < num_sent and not _has_ended(child):
            time.sleep(0.001)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return _look(folder, board, code != (0 if number == signal.SIGINT else -number))


def _has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _wait_for(child: int, board: Board) -> None:
    while not board[_BEGUN] and not _has_ended(child):
        time.sleep(0.0005)


def run(number: int, seed: int, folder: Path) -> dict[str, Any]:
    """Figures of `number` moments of each kind."""
    training = Training(folder, Board(), 0)  # what torch imports at a first step is there for all
    for _ in range(20):
        training.prepare()
        training.step()
    training.guard.close()
    del training
    gc.freeze()
    figures: dict[str, Any] = {}
    totals: Counter[str] = Counter()
    for name, sent in (("kill_9", signal.SIGKILL), ("sigterm", signal.SIGTERM), ("ctrl_c", signal.SIGINT)):
        times = -(-number // NUM_INTERRUPTS) if sent == signal.SIGINT else number
        found = [_try(sent, folder, 1000 * seed + i) for i in range(times)]
        num_moments = times * (NUM_INTERRUPTS if sent == signal.SIGINT else 1)
        is_kill = sent == signal.SIGKILL
        most = int(is_kill)  # records behind, and lines cut off in each log
        bad = [f for f in found if f.unreadable or f.wrong or max(f.silent, f.apart) > most or f.cut_off > 2 * most]
        figures[name] = {
            "num_moments": num_moments,
            "most_records_behind": max(f.behind for f in found),
            "num_behind": sum(f.behind > 0 for f in found),
            "num_records_counted_as_lost": sum(f.behind - f.silent for f in found),
            "num_cut_off_lines": sum(f.cut_off for f in found),
            "num_wrong": len(bad),
        }
        totals["unreadable"] += sum(f.unreadable for f in found)
        totals["silent"] += 0 if is_kill else sum(f.silent for f in found)
        totals["wrong"] += len(bad)
    return {
        "num_moments": sum(part["num_moments"] for part in figures.values()),
        "num_wrong": totals["wrong"],
        "num_unreadable_logs": totals["unreadable"],
        "num_records_lost_in_silence": totals["silent"],
        **figures,
    }


def main() -> int:
    """The command line: prints the figures, and saves them; 1 if anything was not as it should be."""
    parser = argparse.ArgumentParser("python -m benchmarks.reliability.kill", description=__doc__.partition("\n")[0])
    parser.add_argument("--number", type=int, default=500, help="moments of each kind (default: 500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="save nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        figures = run(arguments.number, arguments.seed, Path(folder))
    figures["wall_s"] = round(time.monotonic() - started, 1)
    return finish(figures, RESULTS, dry=arguments.dry)


if __name__ == "__main__":
    sys.exit(main())
