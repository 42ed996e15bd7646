"""A thread that sinks hand their work to, so that training does not wait for a slow tracker."""

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
    """A thread, and a queue of a bounded length to it. What is not done when the process ends is done then.

    Args:
        owner: whose thread it is, by name, and when it is dropped the thread ends.
        work: called with a list of items, oldest first; what it raises is counted, and the items are lost.
        max_items: how many may wait.
        most, wait_s: how many items are handed to `work` at once, and how long is waited until there are as many.

    Attributes:
        num_lost: items that `work` raised for, or that were left when `close` gave up.
        last_error: what it raised last, or None.
    """

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
        self.num_lost = 0
        self.last_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"fastguard {name}", daemon=True)
        self._thread.start()
        # Python calls what was made last first when it ends: guards, which hand over their last records, come before.
        weakref.finalize(owner, self.close)

    def put(self, item: Any) -> None:
        """Has `item` done some time soon.

        Raises:
            ValueError: after `close`.
            RuntimeError: too many wait; the item is not taken.

        Cost: 1 us.
        """
        if not self._is_open:
            raise ValueError(f"`{self._name}` must be open to write, got a closed one. Make a new one.")
        if self._num_put - self._num_done >= self._max_items:
            raise RuntimeError(f"{self._max_items} records wait for the tracker already: it is slower than training")
        self._num_put += 1
        self._queue.put(item)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Waits until all is done; again, and in a process that was forked, does nothing.

        Raises:
            TimeoutError: after `timeout_s`; what is left is lost.
        """
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
                f"the tracker took longer than {timeout_s:g} s for what was left; records lost by that: {left}"
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
            if items:
                self._do(items)

    def _do(self, items: list[Any]) -> None:
        try:
            self._work(items)
        except BaseException as error:  # the guard reports it; SystemExit would end only this thread, without a word
            self.last_error = error
            if not self._is_given_up:
                self.num_lost += len(items)
        finally:
            self._num_done += len(items)


class OnWorker:
    """Of a sink whose worker does what is slow."""

    _worker: Worker

    def close(self) -> None:
        """Waits for what is left.

        Raises:
            TimeoutError: it takes longer than a minute.
        """
        self._worker.close()

    @property
    def num_lost(self) -> int:
        return self._worker.num_lost

    @property
    def last_error(self) -> BaseException | None:
        return self._worker.last_error


class BackgroundSink(OnWorker, Sink):
    """Hands records to another sink on a thread of its own, so that training does not wait for it.

    For trackers that take long: `BackgroundSink(lambda record: run.track(record.norm, "grad/norm", step=record.step))`.
    A record that comes while `max_records` wait is lost, and counted. `close`, and the end of the process, wait up to a
    minute for what is left.

    Args:
        sink: the other sink, or a function of a record. It is called by that thread alone.
        max_records: how many may wait; each keeps its table, 80 bytes a tensor.

    Attributes:
        num_lost: records that the other sink raised for.
        last_error: what it raised last, or None.

    Cost: 1 us a step on the thread that trains, and what Python's lock makes it wait for the other.
    """

    def __init__(self, sink: Sink | Callable[[StepStats], object], max_records: int = 1000) -> None:
        values.at_least(1, "max_records", max_records)
        self.sink = as_sink(sink)
        self._worker = Worker(self, "BackgroundSink", _caller(self.sink), max_records)

    def write(self, record: StepStats) -> None:
        """Has the record written soon.

        Raises:
            ValueError: after `close`.
            RuntimeError: too many wait.
        """
        self._worker.put(("write", record))

    def note(self, facts: dict[str, Any]) -> None:
        """Has the facts noted soon; raises as `write`."""
        self._worker.put(("note", facts))

    def tell(self, finding: dict[str, Any]) -> None:
        """Has the finding told soon; raises as `write`."""
        self._worker.put(("tell", finding))

    def close(self) -> None:
        """Waits for what is left, and closes the other sink.

        Raises:
            TimeoutError: it takes longer than a minute.
        """
        super().close()
        self.sink.close()

    def __repr__(self) -> str:
        return f"BackgroundSink({name_of(self.sink)})"


def _caller(sink: Sink) -> Callable[[list[tuple[str, Any]]], None]:
    def call(items: list[tuple[str, Any]]) -> None:
        for what, item in items:
            take = getattr(sink, what, None)  # a sink by duck typing has but `write`
            if take is not None:
                take(item)

    return call
