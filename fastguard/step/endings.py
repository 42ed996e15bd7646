"""Delivers the newest record, to which `observe` may still add, when the process ends.

That is when the guard is freed; when Python exits, also by `sys.exit` or an uncaught exception; and on SIGTERM, unless
there is another handler. SIGKILL and `os._exit` lose it. A process that forks delivers it once.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from .. import _env
from .ledger import Ledger

_log = logging.getLogger("fastguard")
_held: dict[int, tuple[Ledger, Callable[[], None]]] = {}
_at_sigterm: list[Callable[[], None]] = []
_has_sigterm = False
_blocked: list[int] = []  # the thread that forks, while it blocks SIGTERM


def flush_at_end(guard: Any, ledger: Ledger, flush: Callable[[], None]) -> None:
    """Calls `flush`, which must not refer to the guard, when the guard is freed or the process ends. With sinks, in the
    main thread, and if SIGTERM has no handler, it gets one that calls `flush` and then ends the process by SIGTERM.
    FASTGUARD_SIGTERM=0 disables that."""
    if ledger.sinks:
        _held[id(ledger)] = ledger, flush
        is_free = _is_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if is_free and os.name == "posix" and _env.handles_sigterm():
            signal.signal(signal.SIGTERM, _on_sigterm)
    weakref.finalize(guard, _end, ledger, os.getpid(), flush)


def when_terminated(call: Callable[[], None]) -> None:
    """Has the SIGTERM handler call `call` before it delivers the last records."""
    _at_sigterm.append(call)


def forget(ledger: Ledger) -> None:
    """Call it once the sinks of `ledger` are closed. After the last one the SIGTERM handler is removed."""
    _held.pop(id(ledger), None)
    if not _held:
        _leave()


def _end(ledger: Ledger, process: int, flush: Callable[[], None]) -> None:
    if process == os.getpid():
        try:
            flush()
        finally:
            forget(ledger)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _leave() -> None:
    if _is_main_thread() and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """Flushes all guards and ends the process, but lets a sink finish the record that it is writing."""
    global _has_sigterm
    busy = next((ledger for ledger, _ in _held.values() if ledger.is_writing), None)
    if busy is not None and not _has_sigterm:
        _has_sigterm = True
        busy.when_idle = _come_back  # a second SIGTERM does not wait
        return
    is_replaced = signal.getsignal(number) is not _on_sigterm
    if busy is None:
        for call in _at_sigterm:
            call()
        for _, flush in list(_held.values()):
            try:
                flush()
            except Exception:
                _log.exception("the last record could not be handed to the sinks")
    if is_replaced:
        return  # the handler that replaced this one has called it, and decides whether to end the process
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _come_back() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    if not _is_main_thread():
        time.sleep(1.0)  # the main thread handles the signal before this one starts another record


def _before_fork() -> None:
    """Blocks SIGTERM until the child has removed the handler: Python loses signals that reach a child early."""
    if _held and not _blocked and signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}):
        _blocked.append(threading.get_ident())


def _in_parent() -> None:
    if _blocked:
        _blocked.clear()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _in_child() -> None:
    """Leaves the sinks and the newest record to the parent."""
    for ledger, _ in _held.values():
        ledger.detach_after_fork()
    _held.clear()
    _leave()
    _in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
