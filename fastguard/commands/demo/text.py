"""The demo's data: real text that every machine with Python has."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import torch

from ..cli import CommandError
from .model import CONTEXT

MAX_BYTES = 3_000_000
_HELD_OUT = 0.05


def library_text(max_bytes: int = MAX_BYTES) -> bytes:
    """The standard library's top-level modules, one after another by name, cut off at `max_bytes`."""
    folders = [Path(sysconfig.get_path("stdlib")), Path(os.__file__).parent]
    for folder in folders:
        text = bytearray()
        for path in sorted(folder.glob("*.py")):
            text += path.read_bytes().replace(b"\r\n", b"\n")
            if len(text) >= max_bytes:
                break
        if len(text) > 100 * CONTEXT:
            return bytes(text[:max_bytes])
    tried = " nor in ".join(map(str, dict.fromkeys(folders)))
    raise CommandError(f"found no *.py files of the standard library to train on, neither in {tried}")


class Corpus:
    """Batches from a text, the last twentieth of it held out."""

    def __init__(self, text: bytes, batch_size: int, seed: int, device: torch.device) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.batch_size = batch_size
        self.device = device
        self._num_train = int(len(text) * (1 - _HELD_OUT))
        self._generator = torch.Generator().manual_seed(seed)

    def _cut(self, low: int, high: int, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(low, high - CONTEXT, (count, 1), generator=generator)
        window = self.text[starts + torch.arange(CONTEXT + 1)].long().to(self.device)
        return window[:, :-1], window[:, 1:]

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets [B, T] from random places of the training text."""
        return self._cut(0, self._num_train, self.batch_size, self._generator)

    def held_out(self, count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets from the held-out text: the same ones at every call."""
        return self._cut(self._num_train, len(self.text), count, torch.Generator().manual_seed(1))
