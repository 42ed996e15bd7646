"""Optimizers in the manner of other packages', each with a habit that a skipped step must not be hurt by."""

import random
from collections import defaultdict

import torch


class _Foreign(torch.optim.Optimizer):
    """Evaluates its closure, and then moves each parameter by `update`."""

    def __init__(self, params, **entries):
        super().__init__(params, {"lr": 0.05, **entries})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                self.update(group, p)
        return loss

    def begin(self):
        pass

    def update(self, group, p):
        if p.grad is not None:
            p.add_(p.grad, alpha=-group["lr"])


class TensorInGroup(_Foreign):
    """Counts steps in a tensor of its group, and keeps tensors in lists and dicts in there."""

    def __init__(self, params):
        super().__init__(params, step=torch.zeros(()), held={"list": [torch.ones(2)], "number": 1.0})

    def begin(self):
        for group in self.param_groups:
            group["step"].add_(1)
            group["held"]["list"][0].mul_(1.5)
            group["held"]["number"] *= 0.5
            group["held"]["list"].append(group["step"].clone())


class Attributes(_Foreign):
    """Keeps numbers, tensors, moments by the parameter and a source of random numbers in attributes of its own and of
    what it holds, and has entries of `state` that belong to no parameter. Moves by its moments, gradient or not."""

    class Schedule:
        def __init__(self):
            self.total = torch.zeros(2)

    def __init__(self, params):
        super().__init__(params)
        self.total_step = 0
        self.probability = {"cumulative": 0.0}
        self.random = random.Random(0)
        self.schedule = Attributes.Schedule()

    def begin(self):
        self.total_step += 1
        self.probability["cumulative"] += self.random.random()
        self.schedule.total.add_(self.probability["cumulative"])
        self.newest = self.schedule.total.clone()
        self.moments = vars(self).get("moments", {})
        state = self.state
        state["k"] = state["k"] + 1 if "k" in state else torch.zeros((), dtype=torch.long)
        state.setdefault("seen", []).append(int(state["k"]))

    def update(self, group, p):
        moment = self.moments.setdefault(p, torch.zeros_like(p)).mul_(0.9)
        if p.grad is not None:
            moment.add_(p.grad)
        p.sub_(moment, alpha=group["lr"])


class WantsGradients(_Foreign):
    """Raises where a gradient is missing."""

    def update(self, group, p):
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
        momentum.lerp_(p.grad, 0.1)
        p.mul_(0.99).add_(momentum, alpha=-group["lr"])


class ZerosForMissing(_Foreign):
    """Takes a missing gradient for zeros, so that weights and momentum decay."""

    def update(self, group, p):
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
        momentum.mul_(0.9).add_(gradient)
        p.mul_(0.9).add_(momentum, alpha=-group["lr"])


class DividesByNorm(_Foreign):
    """Raises where all gradients are zero, or none is there."""

    def begin(self):
        squares = [float(p.grad.square().sum()) for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.factor = 1.0 / sum(squares) ** 0.5

    def update(self, group, p):
        p.add_(p.grad, alpha=-group["lr"] * self.factor)


class SwapsData(_Foreign):
    """Writes through `.data`, which autograd does not count, and puts other memory in place."""

    def update(self, group, p):
        if p.grad is not None:
            p.data = p.data * 0.9 - group["lr"] * p.grad.data
        self.state[p]["copy"] = p.data.clone()


class ShapesGradients(_Foreign):
    """Rewrites gradients before several optimizers inside, which hold a part of the parameters each, see them."""

    def __init__(self, params):
        super().__init__(params)
        params = self.param_groups[0]["params"]
        self.optimizers = [torch.optim.SGD(params[:2], lr=0.1, momentum=0.9), torch.optim.AdamW(params[2:], lr=0.01)]

    def begin(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad.sub_(p, alpha=0.1)
        for optimizer in self.optimizers:
            optimizer.step()

    def update(self, group, p):
        pass


class Slow(torch.optim.Optimizer):
    """Holds an optimizer and goes on with the gradients after its step, as Lookahead and TRAC do in their ways."""

    def __init__(self, params):
        self.optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        super().__init__(self.optimizer.param_groups, {})
        self.counter = 0

    def step(self, closure=None):
        return _slow_step(self, closure)


class SlowWithoutInit(torch.optim.Optimizer):
    """As torch_optimizer's Lookahead: never calls Optimizer.__init__."""

    def __init__(self, params):
        self.optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        self.param_groups = self.optimizer.param_groups
        self.state = defaultdict(dict)
        self.defaults = dict(self.optimizer.defaults)
        self.counter = 0

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        return _slow_step(self, closure)


def _slow_step(outer, closure):
    loss = outer.optimizer.step(closure)
    outer.counter += 1
    with torch.no_grad():
        for p in (p for group in outer.param_groups for p in group["params"]):
            slow = outer.state[p].setdefault("slow", p.clone())
            slow.lerp_(p, 0.5)
            p.copy_(slow)
            if p.grad is not None:
                p.add_(p.grad, alpha=-0.01)
    return loss


class MovesFirst(_Foreign):
    """Moves its parameters before its closure, and back only where there is a gradient: schedule-free's manner."""

    def __init__(self, params):
        super().__init__(params, calls=0)

    @torch.no_grad()
    def step(self, closure):
        for p in self._all():
            self.state[p].setdefault("z", p.clone()).mul_(1.01)
            p.lerp_(self.state[p]["z"], 0.5)
        self.param_groups[0]["calls"] += 1
        with torch.enable_grad():
            loss = closure()
        for p in self._all():
            if p.grad is not None:
                p.lerp_(self.state[p]["z"], -0.1).add_(p.grad, alpha=-0.05)
        return loss

    def _all(self):
        return (p for group in self.param_groups for p in group["params"])


class Climbs(_Foreign):
    """Evaluates its closure twice, the second time uphill: sharpness-aware minimisation's manner."""

    @torch.no_grad()
    def step(self, closure):
        params = [p for group in self.param_groups for p in group["params"]]
        with torch.enable_grad():
            closure()
        for p in params:
            self.state[p]["old"] = p.clone()
            if p.grad is not None:
                p.data.add_(p.grad, alpha=0.01)
        with torch.enable_grad():
            loss = closure()
        for p in params:
            if p.grad is not None:
                p.data.copy_(self.state[p]["old"]).add_(p.grad, alpha=-0.05)
        return loss


WITHOUT_CLOSURE = [
    *(TensorInGroup, Attributes, WantsGradients, ZerosForMissing, DividesByNorm, SwapsData, Slow, ShapesGradients),
]
WITH_CLOSURE = [*WITHOUT_CLOSURE, MovesFirst, Climbs]
_OF_TORCH_OR_GUARD = ("_optimizer_", "_guard", "_step_supports", "_zero_grad_profile", "_hook_for", "_warned")


def everything(model, optimizer):
    """All that a step may change: parameters, state, groups and attributes, copied, of inner optimizers too."""
    places = {p: name for name, p in model.named_parameters()}

    def copied(value):
        if isinstance(value, torch.Tensor):
            return places.get(value) or value.detach().clone()
        if isinstance(value, dict):
            return {copied(key) if isinstance(key, torch.Tensor) else key: copied(v) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [copied(v) for v in value]
        if isinstance(value, random.Random):
            return value.getstate()
        if hasattr(value, "__dict__"):
            own = {k: v for k, v in vars(value).items() if not k.startswith(_OF_TORCH_OR_GUARD)}
            return {k: copied(v) for k, v in own.items()}
        return value

    return {"parameters": {n: p.detach().clone() for n, p in model.named_parameters()}, "optimizer": copied(optimizer)}
