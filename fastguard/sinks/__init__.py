"""Sinks, which take one `StepStats` a step. None of them imports torch."""

from __future__ import annotations

from .jsonl import JsonlLog, JsonlSink, read_jsonl
from .memory import MemorySink
from .mlflow import MlflowSink
from .prometheus import PrometheusSink
from .sink import FunctionSink, SafeSink, Sink, as_sink, flatten
from .tensorboard import TensorBoardSink
from .tracker import TrackerSink
from .trackio import TrackioSink
from .wandb import WandbSink

__all__ = ["Sink", "as_sink", "flatten", "FunctionSink", "SafeSink", "MemorySink", "JsonlSink", "JsonlLog",
           "read_jsonl", "TrackerSink", "TensorBoardSink", "WandbSink", "MlflowSink",
           "TrackioSink", "PrometheusSink"]  # fmt: skip
