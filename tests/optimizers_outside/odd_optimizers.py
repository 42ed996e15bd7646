"""Small optimizers, each odd in one way that optimizers in use are: descent along the gradient, but for that.

All of what they keep bears on where the parameters go, so that what a skipped step changes shows in the steps after it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import SGD, Optimizer

Params = Iterable[torch.Tensor]
Closure = Callable[[], torch.Tensor]


class Odd(Optimizer):
    """Descent; subclasses say by how much."""

    def __init__(self, params: Params, **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.01, **defaults})

    def factor(self, group: dict[str, Any]) -> Any:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        for group in self.param_groups:
            factor = group["lr"] * self.factor(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * factor)

    def graded(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]


class CounterInGroup(Odd):
    """Counts in the group, gradient or not."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, k=0)

    def factor(self, group: dict[str, Any]) -> float:
        group["k"] += 1
        return 1 / group["k"]


class TensorInGroup(Odd):
    """The same with a tensor that is written in place."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, k=torch.zeros(()))

    def factor(self, group: dict[str, Any]) -> float:
        return 1 / float(group["k"].add_(1))


class NewTensorInGroup(Odd):
    """The same with another tensor at each step, in a list."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, ks=[torch.zeros(())])

    def factor(self, group: dict[str, Any]) -> float:
        group["ks"][0] = group["ks"][0] + 1
        return 1 / float(group["ks"][0])


class EntryMadeInGroup(Odd):
    """An entry of the group that the first step makes."""

    def factor(self, group: dict[str, Any]) -> float:
        group["k"] = group.get("k", 0) + 1
        return 1 / group["k"]


class EntryOfNoParameter(Odd):
    """Keeps its counter in `state`, under a name."""

    def factor(self, group: dict[str, Any]) -> float:
        if "k" not in self.state:
            self.state["k"] = torch.zeros((), dtype=torch.long)
        self.state["k"] += 1
        return 1 / int(self.state["k"])


class CounterOfItsOwn(Odd):
    """Keeps it in an attribute."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.total = 0

    def factor(self, group: dict[str, Any]) -> float:
        self.total += 1
        return 1 / self.total


class TensorsOfItsOwn(Odd):
    """Keeps one tensor in an attribute, and others in a dict of lists there."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.total = torch.zeros(())
        self.kept = {"all": [torch.zeros(2)]}

    def factor(self, group: dict[str, Any]) -> float:
        self.kept["all"][0].add_(1)
        self.kept["all"].append(self.total.clone())
        return 1 / float(self.total.add_(self.kept["all"][0].mean()) + len(self.kept["all"]))


class Schedule:
    """Counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 1 / self.calls


class ObjectOfItsOwn(Odd):
    """Keeps it in an object of another class."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.schedule = Schedule()

    def factor(self, group: dict[str, Any]) -> float:
        return self.schedule()


class DrawsNumbers(Odd):
    """Draws from a generator of its own."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.random = random.Random(1)

    def factor(self, group: dict[str, Any]) -> float:
        return self.random.random()


class KeyedByAddress(Odd):
    """Keeps moments in a dict of its own, by the id of the parameter, gradient or not."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.moments: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.moments.setdefault(id(p), torch.zeros_like(p)).mul_(0.9)
                if p.grad is not None:
                    moment.add_(p.grad)
                p.sub_(moment, alpha=group["lr"])


class NewStateAtEachStep(Odd):
    """Replaces what `state` holds instead of writing into it."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        for p in self.param_groups[0]["params"]:
            before = self.state[p].get("moment", torch.zeros_like(p))
            self.state[p] = {"moment": before * 0.9 if p.grad is None else before * 0.9 + p.grad}
            p.sub_(self.state[p]["moment"], alpha=0.01)


class NeedsGradients(Odd):
    """Asks nobody whether there is one."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("moment", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            p.sub_(self.state[p]["moment"], alpha=0.01)


class MakesZeros(Odd):
    """Takes zeros where there is none, and goes on to decay."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            p.mul_(0.99).sub_(p.grad, alpha=0.01)


class NeedsOne(Odd):
    """Cannot do without any: it makes one number of all of them, and divides by it."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        norm = float(torch.stack([p.grad.norm() for p in self.graded()]).sum())
        for p in self.graded():
            p.sub_(p.grad, alpha=0.01 / norm**0.5)


class Averages(Odd):
    """Moves all parameters, and by what it has seen of all steps."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        graded = self.graded()
        group = self.param_groups[0]
        group["seen"] = group.get("seen", 0.0) + sum(float(p.grad.norm()) for p in graded)
        for p in group["params"]:
            p.mul_(1 - 0.01 * group["seen"] / (1 + group["seen"]))
        for p in graded:
            p.sub_(p.grad, alpha=0.01)


class Curvature(Odd):
    """Looks at the gradients of the gradients."""

    def step(self, closure: Closure | None = None) -> None:
        graded = self.graded()
        seconds = torch.autograd.grad([p.grad for p in graded], graded, [torch.ones_like(p) for p in graded])
        with torch.no_grad():
            for p, second in zip(graded, seconds):
                p.sub_(p.grad / (1 + second.abs()), alpha=0.01)


class NoLearningRate(Odd):
    """`lr=None`, for one that it works out."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, lr=None)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        for p in self.graded():
            p.sub_(p.grad, alpha=0.01)


class AroundAnother(Odd):
    """Lets another take its step, and goes on with gradients that it has kept itself."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.optimizer = SGD(self.param_groups, lr=0.01, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        kept = [(p, p.grad.clone()) for p in self.graded()]
        self.optimizer.step()
        for p, gradient in kept:
            p.sub_(gradient, alpha=0.01)


class LooksAhead(Odd):
    """Every third step goes back half the way, whatever the optimizer inside has done."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.optimizer = SGD(self.param_groups, lr=0.01, momentum=0.9)
        self.slow = {p: p.detach().clone() for p in self.param_groups[0]["params"]}
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        self.optimizer.step()
        self.calls += 1
        if self.calls % 3 == 0:
            for p, slow in self.slow.items():
                p.copy_(slow.lerp_(p, 0.5))


class ShapesGradients(Odd):
    """Rewrites the gradients before the optimizer inside sees them."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.optimizer = SGD(self.param_groups, lr=0.01)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        for p in self.graded():
            p.grad.sub_(p * (torch.vdot(p.flatten(), p.grad.flatten()) / (p.norm() ** 2 + 1e-12)))
        self.optimizer.step()


class SeveralInside(Odd):
    """Hands its parameters to optimizers in a list."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        params = self.param_groups[0]["params"]
        self.optimizers = [SGD(params[:3], lr=0.01, momentum=0.9), torch.optim.AdamW(params[3:], lr=0.01)]

    def step(self, closure: Closure | None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class MovesBeforeClosure(Odd):
    """Goes elsewhere for its gradients, and comes back where it finds one."""

    def step(self, closure: Closure) -> torch.Tensor:
        params = self.param_groups[0]["params"]
        with torch.no_grad():
            for p in params:
                p.add_(0.125)
        loss = closure()
        with torch.no_grad():
            for p in params:
                if p.grad is not None:
                    p.sub_(0.125).sub_(p.grad, alpha=0.01)
        return loss


class CountsBeforeClosure(Odd):
    """Has advanced its state when the closure runs."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.total = 0

    def step(self, closure: Closure) -> torch.Tensor:
        self.total += 1
        for p in self.param_groups[0]["params"]:
            self.state[p]["k"] = self.state[p].get("k", 0) + 1
        loss = closure()
        with torch.no_grad():
            for p in self.graded():
                p.sub_(p.grad, alpha=0.01 / (self.total + self.state[p]["k"]))
        return loss


class SharpnessAware(Odd):
    """Climbs along the gradient that it is given, asks for another, and has an optimizer inside descend along that."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.inside = SGD(self.param_groups, lr=0.01, momentum=0.9)

    def step(self, closure: Closure) -> None:
        with torch.no_grad():
            for p in self.graded():
                self.state[p]["home"] = p.clone()
                p.add_(p.grad, alpha=0.05)
        closure()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.copy_(self.state[p]["home"])
        self.inside.step()


PLAIN = (
    CounterInGroup, TensorInGroup, NewTensorInGroup, EntryMadeInGroup, EntryOfNoParameter, CounterOfItsOwn,
    TensorsOfItsOwn, ObjectOfItsOwn, DrawsNumbers, KeyedByAddress, NewStateAtEachStep, NeedsGradients, MakesZeros,
    NeedsOne, Averages, NoLearningRate, AroundAnother, LooksAhead, ShapesGradients, SeveralInside,
)  # fmt: skip
WITH_CLOSURE = (MovesBeforeClosure, CountsBeforeClosure)
