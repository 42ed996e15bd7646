"""A sink that writes event files for TensorBoard."""

from __future__ import annotations

import os
import weakref
from typing import Any

from .tracker import TrackerSink, imported

_FLUSH_EVERY_S = 30
_TORCH = "torch.utils.tensorboard"


class TensorBoardSink(TrackerSink):
    """Writes scalars and texts for TensorBoard, one event a step; names are those of `TrackerSink`.

    NaN and Inf are written unchanged. By default TensorBoard shows a sample of 1000 points of a curve and ten texts.
    Start it with `--samples_per_plugin scalars=0,text=0` to see all of them.

    Args:
        target: a folder, or your own `SummaryWriter` of torch, which the sink flushes but does not close.
        purge_step: for a folder, as in `SummaryWriter`: TensorBoard hides the points of all writers in the folder from
            that step on. Use it when you resume a run; otherwise the points of both runs are shown.
        prefix, every, layers, tensors_every: as in `TrackerSink`.

    Raises:
        ImportError: tensorboard is missing.
        TypeError: `target` is neither a path nor a writer.

    Cost: 100 us a step on the training thread. The writer's thread does the rest.
    """

    def __init__(self, target: Any, *, purge_step: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._purge_step = purge_step
        self._is_open, self._folder = True, ""
        self._writer: Any = None
        self._own: list[Any] = []  # the writer, if it is ours; at exit torch's loses what it has not flushed
        weakref.finalize(self, _close, self._own)  # made before the guard's, and so called after it
        if isinstance(target, (str, os.PathLike)):
            self._folder = os.fspath(target)
        elif hasattr(target, "file_writer"):
            if purge_step is not None:
                raise ValueError("`purge_step` must be given to the `SummaryWriter` where `target` is one")
            self._writer = target
        else:
            raise TypeError(f"`target` must be a folder or a `SummaryWriter` of {_TORCH}, got {target!r}")
        self._made = imported(_TORCH, "TensorBoardSink", "tensorboard").summary

    def log(self, step: int, scalars: dict[str, float], texts: dict[str, str]) -> None:
        """Writes one event; a ValueError if the writer was closed."""
        writer = self._file_writer()
        made = self._made
        values = [made.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        for tag, text in texts.items():
            values.extend(made.text(tag, text).value)
        writer.add_summary(made.Summary(value=values), step)

    def _file_writer(self) -> Any:
        if self._writer is None and self._is_open:
            module = imported(_TORCH, "TensorBoardSink", "tensorboard")
            self._writer = module.SummaryWriter(self._folder, purge_step=self._purge_step, flush_secs=_FLUSH_EVERY_S)
            self._own.append(self._writer)
        writer = getattr(self._writer, "file_writer", None)
        if writer is None:
            raise ValueError("`TensorBoardSink` must have an open writer, got a closed one. Make a new one.")
        return writer

    def close(self) -> None:
        """Closes the sink's own writer, or flushes yours."""
        if self._folder:
            self._is_open, self._writer = False, None
            _close(self._own)
        elif getattr(self._writer, "file_writer", None) is not None:
            self._writer.flush()

    def __repr__(self) -> str:
        return f"TensorBoardSink({self._folder!r})" if self._folder else "TensorBoardSink(a SummaryWriter)"


def _close(writers: list[Any]) -> None:
    while writers:
        writers.pop().close()
