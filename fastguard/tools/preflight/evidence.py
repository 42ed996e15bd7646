"""What the checks read: the parts of a training, and measurements of one pass and a few steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...experiments.loss import Answer
from ...names import named_parameters, strip_wrappers
from ..bench import Bench, first_tensor, mapped, output_of, tensors_in
from .losses import Fit, Fitting, ask, constant_baseline
from .watcher import Layer, LossCall, Watcher, is_finite


class Flow(NamedTuple):
    # the share of other samples that the first one's output depends on; None if not known
    across_samples: float | None = None
    # whether outputs depend on their own position, and on no later one; None if that is not known
    is_causal: bool | None = None


def _reached(part: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Where the derivative of a mixture of `part` by each leaf is not zero."""
    weights = torch.linspace(0.5, 1.5, part.numel(), device=part.device, dtype=part.dtype).view_as(part)
    found = torch.autograd.grad((part * weights).sum(), leaves, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) != 0 if g is None else g != 0 for g, leaf in zip(found, leaves)]


@dataclass(slots=True)
class TrialPass:
    seen: Watcher  # of the functions that were called
    output: Any = None  # the model's output; None if only the loss function knows it
    loss: float = math.nan  # its value; NaN if there is none
    num_losses: int = 1  # number of elements of the loss
    requires_grad: bool = False  # whether the loss can be differentiated
    gradients: dict[str, Tensor | None] = field(default_factory=dict)  # by parameter; None if none arrived
    # error, stage: the exception, and where it was raised: "forward" (model or loss) or "backward"
    error: Exception | None = None
    stage: str = ""
    output_made_by: tuple[str, int | None] | None = None  # the activation that made the output, and its dimension
    num_outsiders_reached: int = 0  # number of the optimizer's parameters that are not the model's and got a gradient


class Evidence:
    """A training that has not begun, and measurements of it, most of them made when first used."""

    def __init__(self, bench: Bench, batches: list[Any], *, max_steps: int, seconds: float) -> None:
        self.bench = bench  # model, optimizer and loss
        self.batches = batches  # the first batches
        self.parameters = dict(named_parameters(bench.model))  # the model's parameters by name
        self.groups = bench.optimizer.param_groups
        self._max_steps, self._seconds = max_steps, seconds
        # a trial pass of each batch, from the same start
        self.passes = [self._pass(batch) for batch in batches]

    def _pass(self, batch: Any, *, find_origin: bool = False) -> TrialPass:
        """A forward and a backward pass under a `Watcher`; everything is restored."""
        watcher = Watcher(find_origin=find_origin)
        found = TrialPass(watcher)
        own = set(map(id, self.parameters.values()))
        outsiders = [p for group in self.bench.optimizer.param_groups for p in group["params"] if id(p) not in own]
        with self.bench.put_back(), torch.enable_grad():
            for p in (*outsiders, *self.parameters.values()):
                p.grad = None
            found.stage = "forward"
            try:
                with watcher.on(self.bench.model), watcher:
                    found.output, loss = self.bench.run(batch)
                found.output_made_by = watcher.made_by(first_tensor(found.output, floating=True))
                found.num_losses, found.requires_grad = loss.numel(), loss.requires_grad
                if found.num_losses == 1:
                    found.loss = float(loss.detach())
                found.stage = "backward"
                if found.num_losses == 1 and found.requires_grad:
                    loss.backward()
            except Exception as error:  # reported by the check "trial-pass-fails"
                found.error = error
            found.num_outsiders_reached = sum(p.grad is not None for p in outsiders)
            gradients = {name: p.grad for name, p in self.parameters.items()}
            found.gradients = {name: None if g is None else g.to_dense() for name, g in gradients.items()}
        is_bad = (found.num_losses == 1 and not math.isfinite(found.loss)) or not is_finite([*found.gradients.values()])
        if not find_origin and found.error is None and is_bad:
            again = self._pass(batch, find_origin=True)
            found.seen.origin, found.seen.zero_roots = again.seen.origin, again.seen.zero_roots
        return found

    @property
    def first(self) -> TrialPass:
        return self.passes[0]

    @property
    def ran(self) -> bool:
        """Whether the first pass ended with a finite loss."""
        return self.first.error is None and math.isfinite(self.first.loss)

    @property
    def call(self) -> LossCall | None:
        """The first call of a loss of torch.nn.functional; None if there was none."""
        return next(iter(self.first.seen.losses), None)

    @property
    def calls(self) -> list[LossCall]:
        """The first such call for each batch."""
        return [p.seen.losses[0] for p in self.passes if p.seen.losses]

    @property
    def is_single_loss(self) -> bool:
        """Whether the loss is exactly what that one call returned."""
        call = self.call
        if call is None or call.result is None or call.result.numel() != 1 or len(self.first.seen.losses) != 1:
            return False
        value = float(call.result.detach())
        return abs(value - self.first.loss) <= 1e-4 * abs(value) + 1e-9

    @cached_property
    def inputs(self) -> list[Tensor]:
        is_pair = self.bench.form == "pair"
        return _firsts(self.bench.parts(batch)[0] if is_pair else batch for batch in self.batches)

    @cached_property
    def targets(self) -> list[Tensor]:
        """The targets of each batch: those of the loss call, or else the first tensor of a pair's second part."""
        if self.calls:
            return _firsts(call.target for call in self.calls)
        is_pair = self.bench.form == "pair"
        return _firsts(self.bench.parts(batch)[1] for batch in self.batches) if is_pair else []

    @property
    def output(self) -> Tensor | None:
        """The first floating tensor of the model's output, or the input of the loss call."""
        if self.first.output is not None:
            return first_tensor(self.first.output, floating=True)
        return self.call.input if self.call is not None else None

    @property
    def layers(self) -> list[Layer]:
        return list(self.first.seen.layers.values())

    @property
    def output_made_by(self) -> tuple[str, int | None] | None:
        """The activation that made the input of the loss, and its dimension; None: a layer, or not known."""
        return self.call.made_by if self.call is not None else self.first.output_made_by

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        return {strip_wrappers(f"{name}.").rstrip("."): m for name, m in self.bench.model.named_modules()}

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    @cached_property
    def in_optimizer(self) -> dict[int, Tensor]:
        return {id(p): p for group in self.groups for p in group["params"]}

    @cached_property
    def baseline(self) -> float | None:
        """The mean loss of the best constant answer over the batches; None if it is not known."""
        if not self.is_single_loss:
            return None
        found = [constant_baseline(call) for call in self.calls]
        return None if None in found or not found else max(found)  # type: ignore[type-var]

    @cached_property
    def answer(self) -> Answer:
        """The result of asking the loss, with free outputs in place of the model's."""
        if not self.ran or self.first.num_losses != 1:
            return Answer(abstained="the first pass failed")
        return ask(self.bench, self.batches[0], self.output_made_by, self.flow.is_causal is True)

    @cached_property
    def flow(self) -> Flow:
        """What an output depends on: its derivative by all inputs, in evaluation mode; for integers, by the outputs of
        embeddings."""
        is_pair = self.bench.form == "pair"
        inputs = self.bench.parts(self.batches[0])[0] if is_pair else next(iter(self.inputs), None)
        shapes = [t.shape for t in tensors_in(inputs)]
        embedded: list[Tensor] = []

        def note(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            if args[0].shape not in shapes:  # of positions, not of inputs
                return output
            embedded.append(output.detach().requires_grad_())
            return embedded[-1]

        with self.bench.put_back(), torch.enable_grad(), contextlib.ExitStack() as hooks:
            self.bench.model.eval()
            for module in self.bench.model.modules():
                if isinstance(module, nn.Embedding):
                    hooks.enter_context(module.register_forward_hook(note))
            try:
                given = mapped(lambda t: t.clone().requires_grad_(t.is_floating_point()), inputs)
                output = first_tensor(output_of(self.bench.model, given), floating=True)
                leaves = embedded or [t for t in tensors_in(given) if t.requires_grad]
                if output is None or not output.requires_grad or not leaves or output.dim() < 2:
                    return Flow()
                of_first = [g for g in _reached(output[0], leaves) if len(g) == len(output) > 1]
                others = [g[1:].reshape(len(g) - 1, -1) for g in of_first]
                share = max((float(g.any(1).double().mean()) for g in others), default=None)
                length = leaves[0].shape[1] if leaves[0].dim() > 1 else 0
                middle, dims = length // 2, [d for d in (1, 2) if output.dim() == 3 and output.shape[d] == length > 2]
                parts = [output.select(dim, middle) for dim in dims[:1]]
                at_middle = [g for part in parts for g in _reached(part, leaves) if g.shape[1] == length]
                if not any(bool(g[:, middle].any()) for g in at_middle):  # the model itself shifts its inputs
                    return Flow(share)
                return Flow(share, not any(bool(g[:, middle + 1 :].any()) for g in at_middle))
            except Exception:  # a model that cannot be run in evaluation mode, or differentiated by its inputs
                return Flow()

    @cached_property
    def fit(self) -> Fit | None:
        """Trial steps at several learning rates; None if no step can be taken."""
        first = self.first
        if not self.ran or not first.requires_grad or first.num_losses != 1 or not self.in_optimizer:
            return None
        return Fitting(self.bench, self.batches, self._max_steps, self._seconds).run(self.baseline)


def _firsts(nested: Iterable[Any]) -> list[Tensor]:
    return [tensor.detach() for one in nested if (tensor := first_tensor(one)) is not None]
