"""A sink that writes into a run of Weights & Biases."""

from __future__ import annotations

from typing import Any

from .tracker import RunSink

_ASK_EVERY = 64  # records


class WandbSink(RunSink):
    """Logs to a Weights & Biases run, alongside your own logging; names are those of `TrackerSink`.

    W&B keeps one row per step and silently drops rows for earlier steps. The sink therefore writes a record into the
    row of its own step, or into the current row if that is a later one, and leaves the row open for what you log at the
    same step. You lose no row as long as the `step=` that you pass to `run.log` is not smaller than the number of the
    optimizer's step. If it is, for instance because you count epochs, pass `commit=False`. If your rows are ahead and
    fewer than the optimizer's steps, the newest record in a row replaces the earlier ones. If your rows get ahead after
    hundreds of steps, W&B drops up to 64 of the sink's records before the sink notices.

    The x axis of the sink's curves is `fastguard/step`. The run keeps NaN and Inf; W&B's charts leave them out.

    Args:
        run: the run that `wandb.init` returned, which the sink does not finish. None on ranks that do not log.
        commit: False adds records to the rows that you log, and never starts a row; a row keeps the newest record.
        prefix, every, layers, tensors_every: as in `TrackerSink`.

    Raises:
        ImportError: wandb is missing.
        TypeError: `run` is neither a run nor None.

    Cost: 300 us a step on the training thread, or twice that if your rows are ahead, as with `run.log(d)` at each step.
    W&B's own process does the rest.
    """

    _package = "wandb"

    def __init__(self, run: Any, *, commit: bool = True, **options: Any) -> None:
        super().__init__(run, **options)
        self._commit = commit
        self._defined: set[str] = set()
        self._was_behind = True
        self._until_asked, self._interval = 0, 1

    def log(self, step: int, scalars: dict[str, float], texts: dict[str, str]) -> None:
        """Logs into the row of `step`, or the current one; a ValueError without a run, a wandb.Error if it is over."""
        run, axis = self._run, self.name("step")
        row = {axis: step, **self._row(scalars, texts)}
        for name in row.keys() - self._defined:
            run.define_metric(name, **({} if name == axis else {"step_metric": axis}))
        self._defined.update(row)
        if not self._commit:
            run.log(row, commit=False)
        elif not self._is_behind(step):
            run.log(row, step=step)
        else:
            run.log({axis: step}, step=step)  # begins the row of this step; dropped if that row is past
            run.log(row, commit=False)

    def _is_behind(self, step: int) -> bool:
        """Whether the run's current row is a later one; asked now and then, because it costs as much as a row."""
        self._until_asked -= 1
        if self._until_asked <= 0:
            self._interval = min(2 * self._interval, _ASK_EVERY)
            self._until_asked = self._interval
            try:
                self._was_behind = self._run.step > step
            except Exception:  # unknown if several processes write the run, or after a timeout: assume it is
                self._was_behind = True
        return self._was_behind
