"""A device that is as slow as a test wants it, and a watch on what may not happen."""

from collections import deque
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastguard._device import Courier


class SlowCourier(Courier):
    """Copies when it is told to, in order, as a device does that the host has run ahead of.

    What is copied is what the slot holds by then: a slot that was filled again too early shows.
    """

    def __init__(self, device):
        super().__init__(device)
        self.queue = deque()
        self.num_sent = self.num_waits = 0

    def send(self, parcel):
        parcel.copy.fill_(float("nan"))
        self.queue.append(parcel)
        self.num_sent += 1

    def run(self, number=None):
        """The device goes on: by `number` copies, or to the end."""
        for _ in range(len(self.queue) if number is None else number):
            parcel = self.queue.popleft()
            parcel.copy.copy_(parcel.source)

    def has_arrived(self, parcel):
        return all(waiting is not parcel for waiting in self.queue)

    def wait(self, parcel):
        self.num_waits += not self.has_arrived(parcel)
        while not self.has_arrived(parcel):
            self.run(1)


def slow(optimizer):
    """Puts `optimizer` on a slow device; gives its couriers, one for each time that slots are made."""
    couriers = []

    def courier_for(device):
        couriers.append(SlowCourier(torch.device("cpu")))
        return couriers[-1]

    on_device = optimizer.guard._judge.on_device
    on_device._courier_for, on_device._num_rows = courier_for, -1
    return couriers


def on_the_host(optimizer):
    """Has `optimizer` judged on the host, whatever the engines are said to be."""
    optimizer.guard._judge.choose(waits=True)


_WAITING = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "unique", "masked_select")
_ALLOCATING = ("empty", "zeros", "ones", "full", "clone", "_to_copy", "new_", "rand", "arange", "cat", "stack")


class Watch(TorchDispatchMode):
    """Notes the torch operations for which a host would have to wait for a device, and those that allocate."""

    def __init__(self):
        super().__init__()
        self.waits = []
        self.allocations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in _WAITING:
            self.waits.append(name)
        if name.startswith(_ALLOCATING):
            self.allocations.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def watched():
    """A watch, also on the ways from a tensor to numbers that no dispatcher sees."""
    kept = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu", "__bool__", "__float__", "item")}
    with Watch() as watch:

        def noting(name):
            def method(self, *args, **kwargs):
                watch.waits.append(name)
                return kept[name](self, *args, **kwargs)

            return method

        try:
            for name in kept:
                setattr(torch.Tensor, name, noting(name))
            yield watch
        finally:
            for name, method in kept.items():
                setattr(torch.Tensor, name, method)
