"""Keeps buffers finite: restores them after a skipped step whose forward pass wrote NaN or Inf, as batch norm does."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.cpu import extension
from ..records.failures import Failures
from .observer import ModuleHook, Observer, unwrapped

_NORMS = torch.nn.modules.batchnorm._NormBase  # whose statistics are written past autograd's counter
_SMALL_BYTES = 1 << 20  # of all copies of buffers that nothing writes to; a larger buffer has a pack of its own
_SMALL_SHARE = 0.01  # of the parameters of the model, if that is more
_MOST_BYTES = 64 << 20  # of all copies at every step
_SO = "They may not be finite after a skipped step."
_NUM_FIRST = 3  # steps that all check which buffers are written to
_LOOK_EVERY, _WALK_EVERY = 32, 512  # steps between later such checks, and between searches for new buffers


def tensor_can_be_kept(tensor: Any) -> bool:
    """Whether `tensor` is one whose values can be copied and put back in place."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return not tensor.is_quantized and not torch.nn.parameter.is_lazy(tensor)


class BufferPlace:
    """The place of a buffer: a module's dict and a key, which may hold another tensor at every step."""

    def __init__(self, module: torch.nn.Module, key: str) -> None:
        self.dict: Any = module._buffers
        self.key = key
        self.is_written = isinstance(module, _NORMS) and module.training  # something has written to it
        self._seen = self._mark()

    @property
    def tensor(self) -> torch.Tensor | None:
        return self.dict[self.key] if self.key in self.dict else None  # noqa: SIM401 - a scripted module's has no `get`

    def look(self) -> bool:
        """Whether it was written to for the first time, by the version counter of autograd."""
        seen, self._seen = self._seen, self._mark()
        is_new = not self.is_written and seen != self._seen
        self.is_written = self.is_written or is_new
        return is_new

    def _mark(self) -> tuple[int, int]:
        tensor = self.tensor
        if tensor is None:
            return 0, 0
        return id(tensor), 0 if tensor.is_inference() else tensor._version


def places_of(model: torch.nn.Module) -> list[BufferPlace]:
    """All buffers of `model` that can be copied, non-persistent ones too."""
    modules = [module for module in model.modules() if len(module._buffers)]
    return [BufferPlace(m, key) for m in modules for key, t in m._buffers.items() if tensor_can_be_kept(t)]


class _Pack:
    """Copies of buffers of one dtype on one device, in one tensor."""

    def __init__(self, places: Sequence[BufferPlace], values: Sequence[torch.Tensor]) -> None:
        first = values[0]
        self.places = places
        self._shapes = [value.shape for value in values]
        self.is_alone = len(values) == 1 and first.nbytes > _SMALL_BYTES
        self.kept = torch.cat([value.reshape(-1) for value in values])  # their elements
        self.may_be_bad = (first.is_floating_point() or first.is_complex()) and first.itemsize > 1

    def gather(self) -> torch.Tensor:
        """All elements now; a large buffer is not copied. Raises RuntimeError if the buffers have changed shape."""
        tensors, kept = [place.dict[place.key] for place in self.places], self.kept
        now = tensors[0].detach().reshape(-1) if self.is_alone else torch.cat([t.reshape(-1) for t in tensors])
        if now.numel() != kept.numel() or now.dtype != kept.dtype or now.device != kept.device:
            raise RuntimeError("the buffers have another size, dtype or device")
        return now

    def pieces(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """`packed`, in the buffers' shapes."""
        return [x.view(shape) for x, shape in zip(packed.split([s.numel() for s in self._shapes]), self._shapes)]

    def write(self, packed: torch.Tensor) -> None:
        """Writes `packed` into the buffers, without telling autograd: a graph may still hold them."""
        for place, piece in zip(self.places, self.pieces(packed)):
            buffer = place.tensor
            if buffer is not None and buffer.shape == piece.shape:
                buffer.data.copy_(piece)
            else:
                place.dict[place.key] = piece.clone()


class Buffers(Observer):
    """Follows the buffers of a model, held weakly, from step to step, on any device.

    It copies buffers that the model writes to at every step, at most 64 MiB. It does not copy others, such as masks and
    tables of positions, and checks now and then whether something has written to them.

    Cost of a step: nothing for a model that writes to no buffers; otherwise a copy of them and, on the CPU, a read. On
    a device some fifteen launches, and no sync.
    """

    def __init__(self, model: torch.nn.Module, failures: Failures) -> None:
        self._model = weakref.ref(model)
        self._failures = failures
        self._places: list[BufferPlace] = []
        self._packs: list[_Pack] = []  # of what is written to
        self._calm: list[_Pack] = []  # of what is not
        self.copies: list[Any] = []  # the packs with their places, for C++; of a pack that it does not copy, None
        self._num_followed = self._newest = 0  # how often it was called, and the step of the newest call
        with torch.no_grad():
            self._walk()
        inner = unwrapped(model)  # through which all of it is loaded
        if not self.is_empty and not isinstance(inner, torch.jit.ScriptModule):
            handle = inner.register_load_state_dict_post_hook(ModuleHook(self.refresh))
            self.hold(handle)
            weakref.finalize(self, handle.remove).atexit = False

    @property
    def is_empty(self) -> bool:
        """Whether the model has no buffers."""
        model = self._model()
        return model is None or not any(len(module._buffers) for module in model.modules())

    @property
    def places(self) -> list[BufferPlace]:
        """Places of the buffers that a snapshot copies: those that are written to, and small ones."""
        found = [(place, place.tensor) for place in self._places]
        return [place for place, t in found if t is not None and (place.is_written or t.nbytes <= _SMALL_BYTES)]

    def follow(self, step: int, skipped: bool | torch.Tensor) -> int:
        """Keeps what the forward passes of a judged step wrote, or, if it is `skipped`, restores what was there before.

        Never raises, nor waits for a `skipped` tensor. Returns the step from which to call it again; a skip needs one,
        as does each step while there are `copies`, unless C++ has taken them.
        """
        count, self._num_followed = self._num_followed, self._num_followed + 1
        before, self._newest = self._newest, step
        is_look = count < _NUM_FIRST or step // _LOOK_EVERY != before // _LOOK_EVERY
        with self._failures.kept("buffers", _SO), torch.no_grad():
            if skipped is False and (count == 1 or step // _WALK_EVERY != before // _WALK_EVERY):
                self._walk()
            elif is_look and [place for place in self._places if place.look()]:
                self._sort()
            try:
                self._follow(skipped)
            except (RuntimeError, TypeError, KeyError):  # moved, or no longer there
                self._walk()
                self._follow(skipped)
        return step + 1 if count < _NUM_FIRST else (step // _LOOK_EVERY + 1) * _LOOK_EVERY  # as a batch of steps ends

    def refresh(self, *_: Any) -> None:
        """The present values are good, as after `load_state_dict`."""
        with self._failures.kept("buffers", _SO), torch.no_grad():
            self._packs = self._calm = []
            self._walk()

    def _walk(self) -> None:
        model = self._model()
        if model is not None:
            known = {(id(place.dict), place.key): place for place in self._places}
            self._places = [known.get((id(place.dict), place.key), place) for place in places_of(model)]
            for place in self._places:
                place.look()
        self._sort()

    def _sort(self) -> None:
        """Packs the copies again. Known good values stay, so that no bad one is taken for good."""
        known = {
            (id(place.dict), place.key): piece
            for pack in (*self._packs, *self._calm)
            for place, piece in zip(pack.places, pack.pieces(pack.kept))
        }
        model = self._model() if self._places else None
        size = 0 if model is None else sum(p.nbytes for p in model.parameters() if tensor_can_be_kept(p))
        left = {True: _MOST_BYTES, False: max(_SMALL_BYTES, int(_SMALL_SHARE * size))}
        kinds: dict[Any, list[tuple[BufferPlace, torch.Tensor]]] = {}
        found = [(place, t) for place in self._places if tensor_can_be_kept(t := place.tensor) and t is not None]
        for place, now in sorted(found, key=lambda pair: pair[1].nbytes):
            if now.nbytes > left[place.is_written]:
                continue
            kept = known.get((id(place.dict), place.key), now)
            if kept.shape != now.shape or kept.dtype != now.dtype or kept.device != now.device:
                kept = now
            left[place.is_written] -= now.nbytes
            own = id(place) if now.nbytes > _SMALL_BYTES else 0
            kind = place.is_written, now.dtype, now.device, own
            kinds.setdefault(kind, []).append((place, kept))
        packs = [(is_written, _Pack(*map(list, zip(*members)))) for (is_written, *_), members in kinds.items()]
        self._packs = [pack for is_written, pack in packs if is_written]
        self._calm = [pack for is_written, pack in packs if not is_written]
        # As `copy_buffers` in csrc takes them; None where torch may do it in many threads, or on a device.
        small = [pack.kept.is_cpu and pack.kept.nbytes <= _SMALL_BYTES for pack in self._packs]
        at = [[one for place in pack.places for one in (place.dict, place.key)] for pack in self._packs]
        self.copies[:] = [(pack, *one) if is_small else None for pack, one, is_small in zip(self._packs, at, small)]

    def _follow(self, skipped: bool | torch.Tensor) -> None:
        if skipped is False and self.copies and extension is not None and extension.copy_buffers(self.copies):
            return
        waits = not isinstance(skipped, torch.Tensor) and all(pack.kept.is_cpu for pack in self._packs)
        found = [(pack, pack.gather()) for pack in (*self._packs, *(self._calm if skipped is True and waits else ()))]
        bad = {}
        for pack, now in found:
            if pack.may_be_bad and not (waits and math.isfinite(abs(now.sum().item()))):
                newly_bad = pack.kept.isfinite().logical_and_(now.isfinite().logical_not_())  # no longer finite
                if not waits or newly_bad.any():
                    bad[id(pack)] = newly_bad
        is_put_back: Any = None
        if bad and skipped is not False:
            home = next(iter(bad.values())).device
            is_put_back = torch.stack([one.any().to(home, non_blocking=True) for one in bad.values()]).any()
            if isinstance(skipped, torch.Tensor):
                is_put_back = is_put_back.logical_and(skipped.reshape(()).to(home, non_blocking=True))
        for pack, now in found:
            if is_put_back is not None:
                now = torch.where(is_put_back.to(now.device, non_blocking=True), pack.kept, now)
                pack.write(now)
            newly_bad = bad.get(id(pack))  # nothing good is lost for what is not
            now = now if newly_bad is None else torch.where(newly_bad, pack.kept, now)
            if pack.is_alone:
                pack.kept.copy_(now)
            else:
                pack.kept = now
