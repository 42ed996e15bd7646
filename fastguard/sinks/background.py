"""A worker thread for sinks, so that training does not wait for a slow tracker."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ..records import StepStats, values
from .sink import Sink, as_sink, name_of

_END: Any = object()
CLOSE_TIMEOUT_S = 60.0


class Worker:
    """A thread with a bounded queue. It ends with its `owner`, or with the process, when it has finished the queue."""

    def __init__(
        self,
        owner: Any,
        name: str,
        work: Callable[[list[Any]], Any],
        max_items: int,
        most: int = 1,
        wait_s: float = 0.0,
    ) -> None:
        self._name, self._work = name, work
        self._max_items, self._most, self._wait_s = max_items, most, wait_s
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._process = os.getpid()
        self._is_open = True
        self._is_given_up = False
        self._num_put = self._num_done = 0
        self.num_lost = 0  # number of items for which `work` raised, or that were left when `close` gave up
        self.last_error: BaseException | None = None  # the newest exception of `work`, or None
        self._thread = threading.Thread(target=self._run, name=f"fastguard {name}", daemon=True)
        self._thread.start()
        # At exit Python runs finalizers in reverse order: guards, which deliver their last records, come before this.
        weakref.finalize(owner, self.close)

    def put(self, item: Any) -> None:
        """Queues `item`; a ValueError if the worker is closed, a RuntimeError if the queue is full. Cost: 1 us."""
        if not self._is_open:
            raise ValueError(f"`{self._name}` must be open to write, got a closed one. Make a new one.")
        if self._num_put - self._num_done >= self._max_items:
            raise RuntimeError(f"{self._max_items} records wait for the tracker already; it is slower than training")
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
            until = time.monotonic() + self._wait_s
            while items[-1] is not _END and len(items) < self._most:
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


class OnWorker:
    """A sink whose slow work a `Worker` does."""

    _worker: Worker

    def close(self) -> None:
        """Waits for queued items; a TimeoutError after a minute."""
        self._worker.close()

    @property
    def num_lost(self) -> int:
        return self._worker.num_lost

    @property
    def last_error(self) -> BaseException | None:
        return self._worker.last_error


class BackgroundSink(OnWorker, Sink):
    """Passes records to another sink on a thread of its own, so that training does not wait for a slow tracker.

    For instance: `BackgroundSink(lambda record: run.track(record.norm, "grad/norm", step=record.step))`. If
    `max_records` are already queued, the next record counts as lost. `close` and the end of the process wait up to a
    minute for what is left.

    Args:
        sink: the other sink, or a function of a record. Only that thread calls it.
        max_records: how many records may wait; each keeps its table, 80 bytes a tensor.

    Attributes:
        num_lost: number of records for which the other sink raised.
        last_error: its newest exception, or None.

    Cost: 1 us a step on the training thread, plus waiting for Python's lock while the other thread holds it.
    """

    def __init__(self, sink: Sink | Callable[[StepStats], object], max_records: int = 1000) -> None:
        values.at_least(1, "max_records", max_records)
        self.sink = as_sink(sink)
        inner = self.sink  # not `self`, which the thread must not keep alive

        def call(items: list[tuple[str, Any]]) -> None:
            for what, item in items:
                take = getattr(inner, what, None)  # a sink that does not subclass `Sink` may have only `write`
                if take is not None:
                    take(item)

        self._worker = Worker(self, "BackgroundSink", call, max_records)

    def write(self, record: StepStats) -> None:
        """Queues the record; a ValueError if the sink is closed, a RuntimeError if the queue is full."""
        self._worker.put(("write", record))

    def note(self, facts: dict[str, Any]) -> None:
        """Queues the facts; raises as `write`."""
        self._worker.put(("note", facts))

    def tell(self, finding: dict[str, Any]) -> None:
        """Queues the finding; raises as `write`."""
        self._worker.put(("tell", finding))

    def close(self) -> None:
        """Waits for queued records, and closes the other sink; a TimeoutError after a minute."""
        super().close()
        self.sink.close()

    def __repr__(self) -> str:
        return f"BackgroundSink({name_of(self.sink)})"
