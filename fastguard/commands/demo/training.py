"""The guarded training run, and what becomes of its poisoned batch."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import fastguard

from .model import CharTransformer, loss_of
from .plan import Pace
from .text import Corpus

LEARNING_RATE = 2e-3
MAX_NORM = 1.0
POISONED_BLOCK = 1
_NUM_VALIDATIONS = 5
_NUM_LINES = 10


class Progress:
    """Prints loss, gradient norm and clip rate."""

    _num_told = 0

    def update(self, step: int, loss: float, norm: float, clip_rate: float, num_steps: int) -> None:
        """Shows how step number `step` went."""
        if step >= self._num_told * num_steps / _NUM_LINES or step == num_steps - 1:
            self._num_told += 1
            told = f"loss {loss:.3f}, grad norm {norm:.3f}, clipped {clip_rate:.0%}"
            print(f"step {step:>4} of {num_steps}: {told}", flush=True)


@contextlib.contextmanager
def warnings_printed() -> Iterator[None]:
    """Prints the warnings that fastguard logs meanwhile to stdout, and nowhere else."""
    logger, handler = logging.getLogger("fastguard"), logging.StreamHandler(sys.stdout)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("fastguard: %(message)s"))
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated


@dataclass(frozen=True, slots=True)
class StepCheck:
    """What fastguard made of the poisoned step, and what really happened.

    Attributes:
        step: the step's number.
        expected, named: the tensor that Inf reaches first on the way back, and the one that fastguard named first.
        skipped: whether the record says so.
        num_compared: tensors of parameters and optimizer state compared bit for bit with those before the step.
        num_changed: how many of them differed.
        num_ruined: parameter elements that are NaN or Inf after the same step without a guard, on a copy.
        num_parameters: elements of all parameters.
    """

    step: int
    expected: str
    named: str | None
    skipped: bool
    num_compared: int
    num_changed: int
    num_ruined: int
    num_parameters: int

    @property
    def is_right(self) -> bool:
        """Whether the step was skipped, nothing changed, and the right tensor was named."""
        return self.skipped and self.num_changed == 0 and self.named == self.expected


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished run."""

    model: CharTransformer
    optimizer: torch.optim.Optimizer
    verdict: StepCheck
    first_loss: float
    last_loss: float
    num_steps: int


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """The optimizer of the demo, unguarded."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def train(corpus: Corpus, plan: Pace, sinks: list[Any], progress: Progress) -> Trained:
    """Trains under guard, with one poisoned batch on the way."""
    model = CharTransformer().to(corpus.device)
    optimizer = fastguard.wrap(
        make_optimizer(model),
        model,
        max_norm=MAX_NORM,
        sinks=sinks,
        activations={"overhead_budget": None},  # a budget goes by the clock, and no two logs would be the same
        weights=100,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, plan.learning_rate_factor)
    guard = fastguard.Guard.of(optimizer)
    losses: list[float] = []
    verdict = None
    is_told = False
    step = 0
    while step < plan.num_steps:
        plan.review(step)
        if plan.is_cut and not is_told:
            is_told = True
            print(f"running {plan.num_steps} of {plan.wanted} steps to stay within the time limit", flush=True)
        inputs, targets = corpus.batch()
        if step == plan.poison_at:
            with poisoned(model.blocks[POISONED_BLOCK]):
                loss = loss_of(model, inputs, targets)
                loss.backward()
            verdict = judged_step(model, optimizer, float(loss.detach()))
        else:
            loss = loss_of(model, inputs, targets)
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        guard.observe(loss=loss, val_loss=_validation_loss(model, corpus, step, plan.num_steps))

        record = guard.last
        assert record is not None and record.loss is not None
        losses.append(record.loss)
        progress.update(step, record.loss, record.norm, guard.history.clip_rate, plan.num_steps)
        step += 1
    assert verdict is not None  # the plan keeps the poisoned step in
    last = losses[-max(1, len(losses) // 20) :]
    return Trained(model, optimizer, verdict, losses[0], sum(last) / len(last), step)


@torch.no_grad()
def _validation_loss(model: torch.nn.Module, corpus: Corpus, step: int, num_steps: int) -> float | None:
    """A few times in a run, and at the last step."""
    if step + 1 != num_steps and (step + 1) % max(1, num_steps // _NUM_VALIDATIONS):
        return None
    return float(loss_of(model, *corpus.held_out()))


@contextlib.contextmanager
def poisoned(module: torch.nn.Module) -> Iterator[None]:
    """Makes one element of the gradient at `module`'s output Inf, as an overflow in float16 would.

    The forward pass, and so the loss, is what it always is.
    """

    def put_inf(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[0, -1, 0] = torch.inf
        return gradient

    def forward_hook(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(put_inf)

    handle = module.register_forward_hook(forward_hook)
    try:
        yield
    finally:
        handle.remove()


def judged_step(model: CharTransformer, optimizer: torch.optim.Optimizer, loss: float) -> StepCheck:
    """Takes the poisoned step, compares everything with what it was before, and says what happened."""
    where = f"blocks.{POISONED_BLOCK}"
    guard = fastguard.Guard.of(optimizer)
    step = 0 if guard.last is None else guard.last.step + 1
    print(
        f"\nstep {step}: poisoned on purpose. On the way back, one element of the gradient at the output of\n"
        f"  {where} becomes Inf, as an overflow in float16 would make it. The loss does not show it: {loss:.3f}."
    )
    before = _snapshot(model, optimizer)
    copied = copy.deepcopy(model)
    unguarded = make_optimizer(copied)
    unguarded.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    optimizer.step()

    after = _snapshot(model, optimizer)
    num_changed = abs(len(after) - len(before)) + sum(not torch.equal(a, b) for a, b in zip(after, before))
    record = guard.last
    assert record is not None
    for ours, theirs in zip(model.parameters(), copied.parameters()):
        theirs.grad = None if ours.grad is None else ours.grad.clone()
    torch.nn.utils.clip_grad_norm_(copied.parameters(), MAX_NORM)
    unguarded.step()
    num_ruined = sum(int((~p.isfinite()).sum()) for p in copied.parameters())
    verdict = StepCheck(
        step=record.step,
        expected=[name for name, _ in model.named_parameters() if name.startswith(f"{where}.")][-1],
        named=record.nonfinite[0] if record.nonfinite else None,
        skipped=record.skipped,
        num_compared=len(before),
        num_changed=num_changed,
        num_ruined=num_ruined,
        num_parameters=sum(p.numel() for p in model.parameters()),
    )
    _say(verdict)
    return verdict


def _snapshot(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of all parameters and of the optimizer's state."""
    state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *state)]


def _say(verdict: StepCheck) -> None:
    if verdict.is_right:
        print(
            f"checked: all {verdict.num_compared} tensors of parameters and optimizer state are bit-identical to\n"
            f"  before, and the first tensor with Inf is {verdict.named}, as reported."
        )
    else:
        print(
            f"NOT AS IT SHOULD BE: skipped {verdict.skipped}; {verdict.num_changed} of {verdict.num_compared} tensors "
            f"changed; first bad tensor {verdict.named}, should be {verdict.expected}."
        )
    print(
        f"without a guard: the same gradients, clip_grad_norm_ and AdamW on a copy of the model leave\n"
        f"  {verdict.num_ruined:,} of {verdict.num_parameters:,} parameters NaN or Inf.\n"
    )
