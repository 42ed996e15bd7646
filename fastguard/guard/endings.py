"""How a process ends, or forks, while a guard holds back a record: the last one reaches the sinks all the same, once.

A guard holds the newest record back so that `observe` can add to it. It is written when the guard is dropped and when
Python ends, after `sys.exit` and an uncaught exception too; and when SIGTERM comes, if nobody else handles it. Nothing
is written after SIGKILL and `os._exit`.
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
_is_told_to_end = False
_blocked: list[int] = []  # the thread that forks, while it has SIGTERM wait


def hold(guard: Any, ledger: Ledger, flush: Callable[[], None]) -> None:
    """Has `flush`, which must not refer to the guard, called when that is dropped or the process ends.

    Where there are sinks, SIGTERM gets a handler if this is the main thread and it has none: it calls `flush` too, and
    has the process end by SIGTERM as it would have without it. FASTGUARD_SIGTERM=0 leaves SIGTERM alone.
    """
    if ledger.sinks:
        _held[id(ledger)] = ledger, flush
        _handle()
    weakref.finalize(guard, _end, ledger, os.getpid(), flush)


def let_go(ledger: Ledger) -> None:
    """The sinks of `ledger` are closed. Once this is so of all, SIGTERM is handled as before."""
    _held.pop(id(ledger), None)
    if not _held:
        _leave()


def _end(ledger: Ledger, process: int, flush: Callable[[], None]) -> None:
    if process == os.getpid():
        try:
            flush()
        finally:
            let_go(ledger)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _handle() -> None:
    is_free = _is_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_free and os.name == "posix" and _env.handles_sigterm():
        signal.signal(signal.SIGTERM, _on_sigterm)


def _leave() -> None:
    if _is_main_thread() and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """Writes what is held back, and ends the process; a sink that has a record in hand is first let finish it."""
    global _is_told_to_end
    busy = next((ledger for ledger, _ in _held.values() if ledger.is_writing), None)
    if busy is not None and not _is_told_to_end:
        _is_told_to_end = True
        busy.when_idle = _come_back  # a second SIGTERM does not wait
        return
    if busy is None:
        flush_all()
    if signal.getsignal(number) is not _on_sigterm:
        return  # whoever took our place calls us, and decides what becomes of the process
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _come_back() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    if not _is_main_thread():
        time.sleep(1.0)  # meanwhile the main thread handles it, and no other record is begun


def flush_all() -> None:
    """Has all guards write what they hold back."""
    for _, flush in list(_held.values()):
        try:
            flush()
        except Exception:
            _log.exception("the last record could not be handed to the sinks")


def _before_fork() -> None:
    """Python forgets signals that come to a child before it runs; so SIGTERM waits until nobody handles it there."""
    if _held and not _blocked and signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}):
        _blocked.append(threading.get_ident())


def _in_parent() -> None:
    if _blocked:
        _blocked.clear()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _in_child() -> None:
    """The sinks are the parent's, and so is what is held back."""
    for ledger, _ in _held.values():
        ledger.fall_silent()
    _held.clear()
    _leave()
    _in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
