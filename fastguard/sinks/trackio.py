"""A sink that writes into a run of Trackio."""

from __future__ import annotations

from typing import Any

from .tracker import MAX_LAYERS, Buckets, TrackerSink, Wanted, imported
from .wandb import checked_run, needs_run


class TrackioSink(TrackerSink):
    """Logs to a Trackio run, alongside your own logging; names are those of `TrackerSink`.

    Trackio accepts steps in any order and keeps every row. NaN and Inf are kept.

    Args:
        run: the run that `trackio.init` returned, which the sink does not finish. None on ranks that do not log.
        prefix, every, layers, tensors_every: as in `TrackerSink`.

    Raises:
        ImportError: trackio is missing.
        TypeError: `run` is neither a run nor None.

    Cost: 40 us a step on the training thread. Trackio's thread does the rest.
    """

    def __init__(
        self, run: Any, *, prefix: str = "", every: int = 1, layers: Wanted = MAX_LAYERS, tensors_every: int = 100
    ) -> None:
        super().__init__(prefix=prefix, every=every, layers=layers, tensors_every=tensors_every)
        self._histogram = imported("trackio", "TrackioSink", "trackio").Histogram
        self._run = checked_run(run, "trackio.init")

    def log(self, step: int, scalars: dict[str, float], texts: dict[str, str], histograms: dict[str, Buckets]) -> None:
        """Logs a row. Trackio warns if it cannot.

        Raises:
            ValueError: there is no run.
        """
        needs_run(self._run, "trackio.init")
        made = {name: self._histogram(np_histogram=tuple(buckets)) for name, buckets in histograms.items()}
        self._run.log({**scalars, **texts, **made}, step=step)

    def __repr__(self) -> str:
        return f"TrackioSink({getattr(self._run, 'name', None)!r})"
