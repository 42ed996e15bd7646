"""A sink that writes into a run of Trackio."""

from __future__ import annotations

from .tracker import RunSink


class TrackioSink(RunSink):
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

    _package = "trackio"

    def log(self, step: int, scalars: dict[str, float], texts: dict[str, str]) -> None:
        """Logs a row; a ValueError if there is no run. Trackio warns if it cannot."""
        row = self._row(scalars, texts)
        self._run.log(row, step=step)
