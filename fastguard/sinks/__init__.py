"""Sinks, which take one `StepStats` a step. None of them imports torch."""

from __future__ import annotations

from .background import BackgroundSink as BackgroundSink
from .jsonl import JsonlLog as JsonlLog
from .jsonl import JsonlSink as JsonlSink
from .jsonl import read_jsonl as read_jsonl
from .memory import MemorySink as MemorySink
from .mlflow import MlflowSink as MlflowSink
from .prometheus import PrometheusSink as PrometheusSink
from .sink import FunctionSink as FunctionSink
from .sink import SafeSink as SafeSink
from .sink import Sink as Sink
from .sink import as_sink as as_sink
from .sink import flatten as flatten
from .tensorboard import TensorBoardSink as TensorBoardSink
from .tracker import TrackerSink as TrackerSink
from .trackio import TrackioSink as TrackioSink
from .wandb import WandbSink as WandbSink

__all__ = ["Sink", "as_sink", "flatten", "FunctionSink", "SafeSink", "MemorySink", "JsonlSink", "JsonlLog",
           "read_jsonl", "BackgroundSink", "TrackerSink", "TensorBoardSink", "WandbSink", "MlflowSink",
           "TrackioSink", "PrometheusSink"]  # fmt: skip
