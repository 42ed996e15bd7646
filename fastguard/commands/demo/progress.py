"""What is on the screen while the demo trains: a bar if there is a terminal and tqdm, lines otherwise."""

from __future__ import annotations

import logging
import sys
import textwrap
from types import TracebackType
from typing import Any

WIDTH = 100
_NUM_LINES = 10


class Progress:
    """Shows loss, gradient norm and clip rate, and prints what fastguard logs without tearing the bar."""

    def __init__(self, num_steps: int, *, bar: bool | None = None) -> None:
        self._bar: Any = None
        self._num_told = 0
        if sys.stderr.isatty() if bar is None else bar:
            try:
                from tqdm import tqdm
            except ImportError:
                print("(pip install tqdm to see a progress bar here)", file=sys.stderr)
            else:
                self._bar = tqdm(total=num_steps, desc="training", unit="step", dynamic_ncols=True, file=sys.stderr)
        self._handler = _SayHandler(self)

    def update(self, step: int, loss: float, norm: float, clip_rate: float, num_steps: int) -> None:
        """Shows how step number `step` went."""
        shown = f"loss {loss:.3f}, grad norm {norm:.3f}, clipped {clip_rate:.0%}"
        if self._bar is not None:
            self._bar.total = num_steps
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update()
        elif step >= self._num_told * num_steps / _NUM_LINES or step == num_steps - 1:
            self._num_told += 1
            self.say(f"step {step:>4} of {num_steps}: {shown}")

    def say(self, text: str) -> None:
        """Prints a line."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def __enter__(self) -> Progress:
        logger = logging.getLogger("fastguard")
        self._propagated, logger.propagate = logger.propagate, False
        logger.addHandler(self._handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logger = logging.getLogger("fastguard")
        logger.removeHandler(self._handler)
        logger.propagate = self._propagated
        if self._bar is not None:
            self._bar.close()


class _SayHandler(logging.Handler):
    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        text = f"fastguard: {record.getMessage()}"
        self._progress.say(textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False))
