"""A smaller learning rate that no scheduler sees."""

from __future__ import annotations

import torch


class Slowed:
    """The learning rate times a factor, for one step of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        self._entries = [(group, group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]
        self._slow = [lr * factor for _, lr in self._entries]

    def apply(self) -> None:
        for (group, _), slow in zip(self._entries, self._slow):
            group["lr"] = slow

    def give_back(self) -> None:
        """The very objects that were there before."""
        for (group, lr), slow in zip(self._entries, self._slow):
            if group["lr"] is slow:
                group["lr"] = lr
