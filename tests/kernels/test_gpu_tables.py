"""What is uploaded when, and how kernels are launched: compiled once, then called directly."""

from typing import Any, ClassVar

import pytest
import torch

from fastguard import UnsupportedTensorError
from fastguard._device import Device
from fastguard.kernels.slots import make_slots
from fastguard.kernels.triton import Workspace, launch
from fastguard.kernels.triton import tables as locating
from fastguard.kernels.triton.launch import Launcher
from fastguard.kernels.triton.tables import Tables, locate

from cases import image

CPU = torch.device("cpu")


class FakeEvent:
    def __init__(self):
        self.done = False

    def record(self):
        self.done = False

    def query(self):
        return self.done


class FakeDevice(Device):
    """A device whose copies are done when the test says so."""

    def __init__(self):
        super().__init__(CPU)
        self.events = []
        self.num_pinned = 0
        self.current = "first"
        self.stream_id = lambda: hash(self.current)

    def event(self):
        self.events.append(FakeEvent())
        return self.events[-1]

    def pinned(self, num_words):
        self.num_pinned += 1
        return torch.zeros(num_words, dtype=torch.int64)


def find(tables, tensors):
    return tables.find(*locate(tensors, CPU)[:2])


def addresses(plan):
    return plan.table.tolist()


def test_a_hit_uploads_nothing_and_other_addresses_keep_the_layout():
    device = FakeDevice()
    tables = Tables(device)
    tensors = [torch.zeros(3), torch.zeros(5, dtype=torch.float16)]
    plan = find(tables, tensors)
    for _ in range(2):
        assert find(tables, tensors) is plan
        assert (device.num_pinned, tables.num_misses) == (2, 1)
    others = [t.clone() for t in tensors]
    other = find(tables, others)
    assert other.layout is plan.layout and tables.num_misses == 2
    assert [addresses(p) for p in (plan, other)] == [[t.data_ptr() for t in ts] for ts in (tensors, others)]
    assert find(tables, tensors) is plan


def test_the_oldest_plan_makes_room():
    tables = Tables(FakeDevice(), size=3)
    tensors = [torch.zeros(n) for n in range(1, 6)]
    plans = [find(tables, [t]) for t in tensors]
    assert find(tables, [tensors[4]]) is plans[4]
    assert find(tables, [tensors[0]]) is not plans[0]
    assert addresses(plans[0]) == [tensors[0].data_ptr()]  # who still holds it can still use it
    assert len(tables._plans) == len(tables._layouts) == 3


def test_a_staging_piece_is_not_written_before_its_copy_is_done():
    device = FakeDevice()
    staging = Tables(device)
    data = [i.to_bytes(8, "little") * 4 for i in range(6)]
    staging.upload(data[0])
    staging.upload(data[1])
    assert device.num_pinned == 2  # the first copy is still under way
    device.events[0].done = True
    staging.upload(data[2])
    assert device.num_pinned == 2
    assert not device.events[0].done
    staging.upload(data[3])
    assert device.num_pinned == 3
    for event in device.events:
        event.done = True
    staging.upload(data[4])
    staging.upload(bytes(8 * 5000))  # longer than any piece
    assert device.num_pinned == 4
    assert staging.upload(data[5]).tolist() == [5] * 4


@pytest.mark.parametrize("extension", [True, False])
def test_where_tensors_lie(monkeypatch, extension):
    if not extension:
        monkeypatch.setattr(locating, "extension", None)
    elif locating.extension is None:
        pytest.skip("the extension was not built")
    x, z = image(torch.float32), torch.randn(6, dtype=torch.complex64)
    channels_last = x.to(memory_format=torch.channels_last)
    tensors = [x, x.permute(3, 1, 0, 2), channels_last, torch.nn.Parameter(x), z, x[:0], x[0, 0, 0, 0]]
    addresses, sizes, _, write_back = locate(tensors, CPU)
    assert addresses == b"".join(t.data_ptr().to_bytes(8, "little") for t in tensors)
    numels = [x.numel()] * 4 + [12, 0, 1]
    assert sizes == b"".join((n << 2).to_bytes(8, "little") for n in numels)
    assert not write_back and not locating.is_dense(x[..., ::2])


def test_copies_go_back(workspace):
    base = torch.arange(40.0).reshape(4, 10)
    tensors = [torch.ones(3), base[:, ::2]]  # a plan does not keep what it addresses
    plan = workspace.plan(tensors, writable=True)
    assert not plan.is_plain
    slot = make_slots(workspace.device, 0)[0]
    slot.factor.fill_(2.0)
    workspace.scale(plan, slot)
    assert base[1].tolist() == [20, 11, 24, 13, 28, 15, 32, 17, 36, 19]
    assert tensors[0].tolist() == [2, 2, 2]
    with pytest.raises(UnsupportedTensorError, match=r"tensors\[1\].*one memory location"):
        workspace.plan([base, base[:1].expand(3, 10)], writable=True)


def test_a_tensor_elsewhere_is_refused(workspace):
    with pytest.raises(UnsupportedTensorError, match="must hold data"):
        workspace.plan([torch.ones(3), torch.ones(3, device="meta")])


class FakeStream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


def test_another_stream_waits_for_the_last_one(monkeypatch):
    log = []
    side = FakeDevice()
    side.stream = lambda: FakeStream(log, side.current)
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append(stream.name))
    workspace = Workspace(CPU, side)
    workspace.plan([torch.ones(3)])
    assert log == recorded == []
    side.current = "second"
    workspace.plan([torch.ones(3)])
    assert log == ["second waits for first"]
    assert set(recorded) == {"second"} and len(recorded) >= 3  # partials, addresses, layout


class NotedLaunch:
    """Stands for what Triton builds around a compiled kernel."""

    notes: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, source, metadata):
        self.name = metadata.name

    def __call__(self, x, y, z, stream, function, packed, *rest):
        NotedLaunch.notes.append((self.name, (x, y, z), stream, rest[3:]))  # after metadata and two hooks


class FakeDriver:
    """An H100 as far as Triton can see; it loads binaries into nothing."""

    launcher_cls = NotedLaunch

    def __init__(self):
        self.utils = self
        self.num_loaded = 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 1234

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

    def load_binary(self, *arguments):
        self.num_loaded += 1
        return "module", f"function {self.num_loaded}", 64, 0, 1024

    def unload_module(self, module):
        pass


def forget_binaries():
    from fastguard.kernels.triton.lang import activations, finalise, stats

    for module in (activations, finalise, stats):
        for function in vars(module).values():
            getattr(function, "device_caches", {}).clear()
    for maker in vars(launch).values():
        if hasattr(maker, "cache_clear"):
            maker.cache_clear()


@pytest.fixture
def driver(compiles):
    from triton.runtime import driver as drivers

    fake = FakeDriver()
    NotedLaunch.notes = []
    real = drivers.__dict__.get("_active")
    drivers.set_active(fake)
    forget_binaries()  # a GPU here may have loaded its own
    yield fake
    forget_binaries()
    drivers._active = real


def test_a_kernel_is_compiled_once_for_all_values_and_then_called_directly(driver, monkeypatch):
    launcher = launch.scale_launcher(torch.bfloat16, CPU)
    assert launcher.launch == launcher._first
    for value in (0, 1, 16, 17, -1, 2**31, 2**63 - 1):
        launcher.ordinary(7, *[value] * 6)
        launcher(7, *[value] * 6)
        assert NotedLaunch.notes[-1] == NotedLaunch.notes[-2]
    assert driver.num_loaded == 1 and launcher.launch not in (launcher._first, launcher.ordinary)
    monkeypatch.setattr(launcher, "function", None)  # from here on, not even looked at
    launcher(3, *range(6))
    name, grid, stream, arguments = NotedLaunch.notes[-1]
    assert (name, grid, stream, str(arguments[6])) == ("scale_kernel", (3, 1, 1), 1234, "bf16")
    assert arguments[:6] == tuple(range(6)) and arguments[7:] == (launch.CHUNK, launch.LANES)


def test_one_launch_a_dtype_and_one_more(driver):

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

    def __init__(self, error=None):
        self.calls = []
        self.error = error

    def warmup(self, *arguments, **options):
        if self.error is not None:
            raise self.error
        return object()

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.calls.append((grid, arguments, options))


@pytest.mark.parametrize("error", [None, TypeError("warmup()"), KeyError("grid")])
def test_an_unknown_triton_is_used_the_ordinary_way(error):
    kernel = OtherTriton(error)
    launcher = Launcher(kernel, {"BLOCK": 4}, num_warps=2, fp_fusion=False)
    launcher(3, 1, 2)
    launcher(5, 3, 4)
    options = {"BLOCK": 4, "num_warps": 2, "enable_fp_fusion": False}
    assert kernel.calls == [((3,), (1, 2), options), ((5,), (3, 4), options)]
    assert launcher.launch == launcher.ordinary


def test_an_error_of_the_device_is_not_hidden():
    launcher = Launcher(OtherTriton(RuntimeError("CUDA error")), {}, num_warps=1, fp_fusion=False)
    with pytest.raises(RuntimeError, match="CUDA error"):
        launcher(1)
