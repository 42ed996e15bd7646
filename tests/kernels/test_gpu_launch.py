"""How kernels are launched, on a driver that only takes notes: compiled once, then called directly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from fastguard.kernels.triton import launch
from fastguard.kernels.triton.launch import Launcher

CPU = torch.device("cpu")


class NotedLaunch:
    """Stands for what Triton builds around a compiled kernel."""

    notes: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, packed: Any, *rest: Any) -> None:
        NotedLaunch.notes.append((self.name, (x, y, z), stream, rest[3:]))  # after metadata and two hooks


class FakeDriver:
    """An H100 as far as Triton can see; it loads binaries into nothing."""

    launcher_cls = NotedLaunch

    def __init__(self) -> None:
        self.utils = self
        self.num_loaded = 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 1234

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, *arguments: Any) -> tuple[Any, ...]:
        self.num_loaded += 1
        return "module", f"function {self.num_loaded}", 64, 0, 1024

    def unload_module(self, module: Any) -> None:
        pass


@pytest.fixture
def driver(compiles: None) -> Iterator[FakeDriver]:
    from triton.runtime import driver as drivers

    fake = FakeDriver()
    NotedLaunch.notes = []
    real = drivers.__dict__.get("_active"), drivers.__dict__.get("_default")
    drivers.set_active(fake)
    from fastguard.kernels.triton import activations

    caching = [*vars(launch).values(), *vars(activations).values()]
    makers = [maker for maker in caching if hasattr(maker, "cache_clear")]
    for maker in makers:
        maker.cache_clear()
    yield fake
    from fastguard.kernels.triton.lang import activations as activation_kernels
    from fastguard.kernels.triton.lang import finalise
    from fastguard.kernels.triton.lang import stats as kernels

    for module in (activation_kernels, finalise, kernels):
        for function in vars(module).values():
            getattr(function, "device_caches", {}).clear()  # binaries of a device that is no more
    for maker in makers:
        maker.cache_clear()
    drivers._active = real[0]


def test_a_kernel_is_compiled_once_and_then_called_directly(driver: FakeDriver, monkeypatch) -> None:
    launcher = launch.finalise_launcher(CPU)
    assert launcher.launch is None
    launcher(1, 16, 1, 2**40, 0, 0, 3, 7, 6, 1, 2, 3, 4)
    assert launcher.launch not in (None, launcher.ordinary)
    monkeypatch.setattr(launcher, "function", None)  # from here on, not even looked at
    launcher(1, 1, 16, 32, 64, 1, 0, -5, 8, 2**62, 4, 3, 2)
    assert driver.num_loaded == 1
    constants = launch.CHUNK, launch.FOLD_BLOCK, launch.ROW_BLOCK
    assert [note[1:] for note in NotedLaunch.notes] == [
        ((1, 1, 1), 1234, (16, 1, 2**40, 0, 0, 3, 7, 6, 1, 2, 3, 4, *constants)),
        ((1, 1, 1), 1234, (1, 16, 32, 64, 1, 0, -5, 8, 2**62, 4, 3, 2, *constants)),
    ]


def test_no_value_makes_another_kernel_and_both_ways_say_the_same(driver: FakeDriver) -> None:
    launcher = launch.scale_launcher(torch.bfloat16, CPU)
    for value in (0, 1, 16, 17, -1, 2**31, 2**63 - 1):
        launcher.ordinary(7, *[value] * 6)
        launcher(7, *[value] * 6)
        assert NotedLaunch.notes[-1] == NotedLaunch.notes[-2]
    assert driver.num_loaded == 1
    name, grid, _, arguments = NotedLaunch.notes[-1]
    assert (name, grid, str(arguments[6]), arguments[7:]) == (
        "scale_kernel",
        (7, 1, 1),
        "bf16",
        (launch.CHUNK, launch.LANES),
    )


def test_one_launch_a_dtype_and_one_more(driver: FakeDriver) -> None:
    from fastguard.kernels.slots import make_slots
    from fastguard.kernels.triton import Workspace

    workspace = Workspace(CPU)
    tensors = [torch.zeros(n, dtype=d) for n in (10, 40_000) for d in (torch.float32, torch.bfloat16)] * 50
    slots = make_slots(CPU, len(tensors))
    for _ in range(3):
        NotedLaunch.notes.clear()
        plan = workspace.plan(tensors)
        workspace.measure(plan, slots[0])
        assert [(name, grid[0]) for name, grid, *_ in NotedLaunch.notes] == [
            ("stats_kernel", 150),
            ("stats_kernel", 150),
            ("finalise_kernel", 201),
        ]
        workspace.scale(plan, slots[0])
        assert [name for name, *_ in NotedLaunch.notes[3:]] == ["scale_kernel", "scale_kernel"]


class OtherTriton:
    """A Triton whose compiled kernels have nothing that we know."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error = error

    def warmup(self, *arguments: Any, **options: Any) -> Any:
        if self.error is not None:
            raise self.error
        return object()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.calls.append((grid, arguments, options))


@pytest.mark.parametrize("error", [None, TypeError("warmup()"), KeyError("grid")])
def test_an_unknown_triton_is_used_the_ordinary_way(error: Exception | None) -> None:
    kernel = OtherTriton(error)
    launcher = Launcher(kernel, {"BLOCK": 4}, num_warps=2, fp_fusion=False)
    launcher(3, 1, 2)
    launcher(5, 3, 4)
    options = {"BLOCK": 4, "num_warps": 2, "enable_fp_fusion": False}
    assert kernel.calls == [((3,), (1, 2), options), ((5,), (3, 4), options)]
    assert launcher.launch == launcher.ordinary


def test_an_error_of_the_device_is_not_hidden() -> None:
    launcher = Launcher(OtherTriton(RuntimeError("CUDA error")), {}, num_warps=1, fp_fusion=False)
    with pytest.raises(RuntimeError, match="CUDA error"):
        launcher(1)
