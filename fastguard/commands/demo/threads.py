"""How many threads the demo is quickest with: more than there are free cores for wait for one another."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .model import CharTransformer, loss_of
from .text import Corpus

_CLEARLY_FASTER = 1.3


def choose(corpus: Corpus) -> None:
    """Halves torch's number of threads as long as that makes a training step clearly faster.

    That is so in a container with fewer cores than it shows, and beside other programs.
    """
    if corpus.device.type != "cpu" or torch.get_num_threads() == 1:
        return
    torch.manual_seed(0)
    model = CharTransformer()
    inputs, targets = corpus.held_out(corpus.batch_size)
    fewest_possible(lambda: loss_of(model, inputs, targets).backward())


def fewest_possible(work: Callable[[], object]) -> None:
    """Sets the number of threads for `work`, which is run six times or more."""
    best = _seconds(work)
    while torch.get_num_threads() > 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(threads // 2)
        seconds = _seconds(work)
        if seconds * _CLEARLY_FASTER > best:
            torch.set_num_threads(threads)
            return
        best = seconds


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
