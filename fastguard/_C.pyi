from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

columns: tuple[tuple[str, int, str, bool], ...]
openmp: bool
compiler: str

def set_tensor_access(
    tensor_type: type,
    parameter_type: type,
    gradient: object,
    prepare: Callable[[object, int], torch.Tensor],
    prepare_writable: Callable[[object, int], torch.Tensor],
    describe: Callable[[torch.Tensor], tuple[int, str, tuple[int, ...], tuple[int, ...]] | None],
    exchange_api: object | None,
    examples: list[tuple[torch.Tensor, torch.Tensor]],
) -> None: ...
def tensor_stats(
    tensors: Sequence[object], num_threads: int, unscale: float = 1.0, plain_only: bool = False
) -> tuple[bytearray, tuple[float, ...], int] | None: ...
def activation_stats(
    tensor: object, low: float, high: float, near_zero: float, num_threads: int
) -> tuple[float, ...] | None: ...
def channel_stats(
    tensor: object, dim: int, low: float, high: float, near_zero: float, num_threads: int
) -> tuple[tuple[float, ...], bytes] | None: ...
def magnitude_counts(tensors: Sequence[object], num_threads: int) -> list[int]: ...
def locate_tensors(tensors: Sequence[object]) -> tuple[bytes, bytes] | None: ...
def scale_(tensors: Sequence[object], factor: float, num_threads: int) -> None: ...
def read_stream(tensors: Sequence[object], num_threads: int, prefetch: bool) -> int: ...
def collect_gradients(
    groups: list[list[torch.Tensor]],
) -> tuple[list[torch.Tensor], list[int] | None, int]: ...
def gradient_stats(
    groups: list[list[torch.Tensor]], num_threads: int, unscale: float
) -> tuple[bytearray, tuple[float, ...], list[int] | None, int, int] | None: ...
def take_step(
    param_groups: list[dict[str, object]],
    headers: bytearray,
    index: int,
    found: list[object],
    step: int,
    num_threads: int,
    limits: float | tuple[Any, ...],
    skip_nonfinite: bool,
    scales: bool,
    /,
) -> int: ...
def clip_gradients(
    parameters: list[torch.Tensor], num_threads: int, max_norm: float, finite_only: bool
) -> tuple[float, int, list[torch.Tensor] | None] | None: ...
def follow(norms: array[float], means: array[float], limits: array[float], keep: float, ratio: float) -> int: ...
def json_line(headers: bytearray, index: int, table: bytearray, time: float) -> bytes: ...
def stats_and_checksums(
    tensors: Sequence[object], num_threads: int
) -> tuple[bytearray, tuple[float, ...], bytearray] | None: ...

class ShardPlan:
    known: list[tuple[Any, tuple[Any, ...]]]
    def gradient_stats(
        self, groups: list[list[torch.Tensor]], num_threads: int, unscale: float
    ) -> tuple[Any, ...] | None: ...
    def tensor_stats(self, tensors: list[torch.Tensor], num_threads: int) -> tuple[Any, ...] | None: ...

def fold_rows(table: bytearray) -> tuple[float, ...]: ...
def isa() -> str: ...
def isa_names() -> list[str]: ...
def select_isa(name: str) -> None: ...
