"""Where records go: a sink takes one `StepStats` a step. None of them needs torch."""

from __future__ import annotations

from .base import FunctionSink as FunctionSink
from .base import SafeSink as SafeSink
from .base import Sink as Sink
from .base import as_sink as as_sink
from .base import flatten as flatten
from .jsonl import JsonlLog as JsonlLog
from .jsonl import JsonlSink as JsonlSink
from .jsonl import read_jsonl as read_jsonl
from .memory import MemorySink as MemorySink

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
