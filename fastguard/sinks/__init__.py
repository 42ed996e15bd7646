"""Where records go: a sink takes one `StepStats` a step. None of them needs torch."""

from __future__ import annotations

from .jsonl import JsonlLog as JsonlLog
from .jsonl import JsonlSink as JsonlSink
from .jsonl import read_jsonl as read_jsonl
from .memory import MemorySink as MemorySink
from .sink import FunctionSink as FunctionSink
from .sink import SafeSink as SafeSink
from .sink import Sink as Sink
from .sink import as_sink as as_sink
from .sink import flatten as flatten

__all__ = [
    "Sink",
    "as_sink",
    "flatten",
    "FunctionSink",
    "SafeSink",
    "MemorySink",
    "JsonlSink",
    "JsonlLog",
    "read_jsonl",
]
