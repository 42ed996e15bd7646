"""A sink that writes into a run of MLflow."""

from __future__ import annotations

import functools
import math
import os
import queue
import re
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from typing import Any

from .tracker import TrackerSink, imported

_MAX_METRICS, _MAX_TAGS = 1000, 100  # the maximum that a server takes at once
_MOST, _WAIT_S, _MAX_RECORDS = 50, 5.0, 10_000  # records a batch; seconds to wait for them; records that may wait
_MAX_NAME, _MAX_TEXT = 250, 5000
CLOSE_TIMEOUT_S = 60.0
_END: Any = object()
_ODD = re.compile(r"[^\w\-. :/]")


class Worker:
    """A thread with a bounded queue of rows, which it gives to `work` in batches. It ends with its `owner`, or with the
    process, when it has finished the queue."""

    def __init__(self, owner: Any, work: Callable[[list[Any]], Any]) -> None:
        self._work = work
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._process = os.getpid()
        self._is_open = True
        self._is_given_up = False
        self._num_put = self._num_done = 0
        self.num_lost = 0  # number of items for which `work` raised, or that were left when `close` gave up
        self.last_error: BaseException | None = None  # the newest exception of `work`, or None
        self._thread = threading.Thread(target=self._run, name="fastguard MlflowSink", daemon=True)
        self._thread.start()
        # At exit Python runs finalizers in reverse order: guards, which deliver their last records, come before this.
        weakref.finalize(owner, self.close)

    def put(self, item: Any) -> None:
        """Queues `item`; a ValueError if the worker is closed, a RuntimeError if the queue is full. Cost: 1 us."""
        if not self._is_open:
            raise ValueError("`MlflowSink` must be open to write, got a closed one. Make a new one.")
        if self._num_put - self._num_done >= _MAX_RECORDS:
            raise RuntimeError(f"{_MAX_RECORDS} records wait for the tracker already; it is slower than training")
        self._num_put += 1
        self._queue.put(item)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Waits until the queue is empty; a TimeoutError after `timeout_s`, when the items that are left are lost."""
        if not self._is_open or self._process != os.getpid():
            return
        self._is_open = False
        self._queue.put(_END)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._is_given_up = True
            left = self._num_put - self._num_done
            self.num_lost += left
            raise TimeoutError(
                f"the tracker took longer than {timeout_s:g} s for the queued records; records lost by that: {left}"
            )

    def _run(self) -> None:
        is_open = True
        while is_open:
            items = [self._queue.get()]
            until = time.monotonic() + _WAIT_S
            while items[-1] is not _END and len(items) < _MOST:
                try:
                    items.append(self._queue.get(timeout=max(0.0, until - time.monotonic())))
                except queue.Empty:
                    break
            if items[-1] is _END:
                is_open = False
                del items[-1]
            try:
                if items:
                    self._work(items)
            except BaseException as error:  # the guard reports it; SystemExit would silently end only this thread
                self.last_error = error
                if not self._is_given_up:
                    self.num_lost += len(items)
            self._num_done += len(items)


class MlflowSink(TrackerSink):
    """Logs to an MLflow run in batches, on a thread of its own; names are those of `TrackerSink`.

    A batch is sent after 50 records or five seconds. `close` and the end of the process wait up to a minute for queued
    records. Records that the server refuses or does not receive count as lost. Characters that MLflow rejects in names
    become `_`. NaN is kept. Inf is written as NaN, because MLflow would turn it into 1.8e308; the counts of NaN and Inf
    tell them apart. Texts become tags of the run; a newer text replaces an older one.

    Args:
        run: a run or its id; None uses the run that is active at the first record.
        tracking_uri: where the run is; None uses MLflow's current setting.
        prefix, every, layers, tensors_every: as in `TrackerSink`.

    Raises:
        ImportError: mlflow is missing.

    Attributes:
        num_lost: number of records that could not be logged.
        last_error: the newest exception, or None.

    Cost: 20 us a step on the training thread. The other thread takes 60 us a metric if the database is on disk, and
    holds Python's lock for a part of that.
    """

    def __init__(self, run: Any = None, *, tracking_uri: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._mlflow = imported("mlflow", "MlflowSink", "mlflow")
        self._run = run
        self._worker = Worker(self, _sender(self._mlflow, tracking_uri))

    def log(self, step: int, scalars: dict[str, float], texts: dict[str, str]) -> None:
        """Queues a row; a ValueError without a run or after `close`, a RuntimeError if 10,000 are already queued."""
        if self._run is None:
            self._run = self._mlflow.active_run()
            if self._run is None:
                raise ValueError("`run` must be a run of MLflow or its id, got None, and none is active. Start one.")
        self._worker.put((self.run_id, step, int(time.time() * 1000), scalars, texts))

    def close(self) -> None:
        """Waits for queued rows; a TimeoutError after a minute."""
        self._worker.close()

    @property
    def num_lost(self) -> int:
        return self._worker.num_lost

    @property
    def last_error(self) -> BaseException | None:
        return self._worker.last_error

    @property
    def run_id(self) -> str | None:
        """Id of the run; None before the first record if no run was given."""
        return self._run if self._run is None or isinstance(self._run, str) else self._run.info.run_id

    def __repr__(self) -> str:
        return f"MlflowSink({self.run_id!r})"


def _sender(mlflow: Any, tracking_uri: str | None) -> Callable[[list[Any]], None]:
    """A function that sends rows of a run's id, step, milliseconds since 1970, scalars and texts."""
    names: dict[str, str] = {}

    def name_of(name: str) -> str:
        if name not in names:
            known = accepted(name)
            while known in names.values():  # another name was changed to the same
                digest = zlib.crc32(f"{name}{known}".encode(errors="backslashreplace"))
                known = f"{known[: _MAX_NAME - 9]}_{digest:08x}"
            names[name] = known
        return names[name]

    @functools.cache
    def client() -> Any:  # made by the thread, because that may create a database
        return mlflow.MlflowClient(tracking_uri)

    def send(rows: list[tuple[str, int, int, dict[str, float], dict[str, str]]]) -> None:
        metric, tag = mlflow.entities.Metric, mlflow.entities.RunTag
        metrics, tags = [], {}
        for _, step, time_ms, scalars, texts in rows:
            for name, value in scalars.items():
                metrics.append(metric(name_of(name), math.nan if math.isinf(value) else value, time_ms, step))
            tags.update({name_of(name): text[:_MAX_TEXT] for name, text in texts.items()})
        left = [tag(name, text) for name, text in tags.items()]
        while metrics or left:
            client().log_batch(rows[0][0], metrics=metrics[:_MAX_METRICS], tags=left[:_MAX_TAGS])
            del metrics[:_MAX_METRICS], left[:_MAX_TAGS]

    return send


def accepted(name: str) -> str:
    """`name` in the form that MLflow accepts: a rejected name would lose the whole batch.

    >>> accepted("grad/norm/a[0]#1"), accepted("/a//b/../c"), accepted("..")
    ('grad/norm/a_0__1', '_/a/_/b/__/c', '__')
    """
    parts = _ODD.sub("_", name).split("/")
    parts = ["_" * max(1, len(part)) if part in ("", ".", "..") else part for part in parts]
    whole = re.sub(r"^\.\.", "__", "/".join(parts))
    half = _MAX_NAME // 2
    return whole if len(whole) <= _MAX_NAME else f"{whole[:half]}_{whole[1 - half :]}"
