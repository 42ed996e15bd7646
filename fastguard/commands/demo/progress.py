"""What is on the screen while the demo trains: a line every tenth of the way."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

WIDTH = 100
_NUM_LINES = 10


class Progress:
    """Prints loss, gradient norm and clip rate."""

    _num_told = 0

    def update(self, step: int, loss: float, norm: float, clip_rate: float, num_steps: int) -> None:
        """Shows how step number `step` went."""
        if step >= self._num_told * num_steps / _NUM_LINES or step == num_steps - 1:
            self._num_told += 1
            told = f"loss {loss:.3f}, grad norm {norm:.3f}, clipped {clip_rate:.0%}"
            print(f"step {step:>4} of {num_steps}: {told}", flush=True)


@contextlib.contextmanager
def warnings_printed() -> Iterator[None]:
    """Prints the warnings that fastguard logs meanwhile to stdout, and nowhere else."""
    logger, handler = logging.getLogger("fastguard"), logging.StreamHandler(sys.stdout)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("fastguard: %(message)s"))
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
