"""Asks a loss what it wants: free outputs are optimised under it, without the model, and read against the targets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .targets import AbstainError, Reading, changed, padding_value, read

MAX_ELEMENTS = 1 << 17  # of all outputs together: 25 MiB and 0.3 s were measured
ENOUGH = 0.9  # agreement of the optimum with a target
LEAST_SAMPLES = 4
_MOST_SECONDS = 1.0  # a step that has begun is finished
_NUM_STEPS = 120
_SEED = 7
_SCALES = (1.0, 0.1, 1.0, 2.0)  # of random outputs at which gradients are looked for


@dataclass(frozen=True)
class Problem:
    """Something that a loss does not want as it should."""

    kind: str  # "target", "left out", "padding" or "elsewhere"
    message: str  # a sentence with the numbers
    remedy: str  # what to do
    evidence: dict[str, Any] = field(default_factory=dict)  # the numbers by name
    confidence: float = 0.9  # how sure


@dataclass(frozen=True)
class Answer:
    problems: tuple[Problem, ...] = ()  # in the order in which they should be read
    abstained: str = ""  # why nothing could be decided; empty where it could
    optimum: tuple[Tensor, ...] = ()  # the outputs that minimise the loss


def ask_loss(
    judge: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor],
    outputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    inputs: Sequence[Tensor] = (),
    ending: Callable[[Tensor], Tensor] | None = None,
    is_causal: bool = False,
    are_targets: bool = True,
) -> Answer:
    """Optimises free outputs under a loss and compares the optimum with the targets.

    Adam on tensors in place of the outputs, with other random numbers at each step. The loss is wrong if the optimum
    does not decode to the targets, if samples, outputs or targets have no effect, if positions to be ignored have one,
    or if it is as low where predictions are off. Abstains if outputs are not in the space of the targets: embeddings,
    rewards, densities without a mean, losses that take classes for groups. Raises what the loss raises.

    Args:
        judge: the loss of outputs and targets: one element.
        outputs, inputs: what the model gave, floating, samples first, and was given.
        targets: tensors that the loss may compare them with; unless `are_targets`, others of the batch are among them.
        ending: a function that a model with one output ends with, like softmax; None if it ends with a layer.
        is_causal: whether an output at a position depends on no later input.

    Cost: 250 to 500 forward and backward passes of the loss alone; memory for some fifty copies of the outputs, of
        `MAX_ELEMENTS` elements at most. Global random generators advance: the caller restores them. Synchronises.
    """
    if not outputs or not targets:
        return Answer(abstained="there are no outputs or no targets")
    if sum(o.numel() for o in outputs) > MAX_ELEMENTS:
        return Answer(abstained=f"the outputs have more than {MAX_ELEMENTS} elements")
    if any(o.dim() == 0 or len(o) < LEAST_SAMPLES for o in outputs):
        return Answer(abstained=f"there are fewer than {LEAST_SAMPLES} samples, or an output without samples")
    deadline = time.perf_counter() + _MOST_SECONDS
    asking = _Asking(judge, outputs, targets, inputs, ending, is_causal, are_targets, deadline)
    try:
        return asking.answer()
    except AbstainError as reason:
        return Answer(abstained=str(reason))


@dataclass
class _Asking:
    """Outputs that are free, in the place of the model's, under a loss; and what they say of it."""

    judge: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
    given: Sequence[Tensor]
    targets: Sequence[Tensor]
    inputs: Sequence[Tensor]
    ending: Callable[[Tensor], Tensor] | None
    is_causal: bool
    are_targets: bool
    deadline: float

    def __post_init__(self) -> None:
        device = self.given[0].device
        self.targets = [t.detach().to(device) for t in self.targets]
        self.inputs = [x.detach().to(device) for x in self.inputs]
        self.ending = self.ending if len(self.given) == 1 else None
        self.pull = [torch.zeros(o.shape, device=device) for o in self.given]
        self.touched = [torch.zeros(o.shape, dtype=torch.bool, device=device) for o in self.given]
        self.dice = torch.Generator().manual_seed(0)
        numbers = [t.double().abs().mean() for t in self.targets if t.is_floating_point() and t.isfinite().all()]
        self.best = list[Tensor]()  # the outputs that minimise the loss
        self.loss = math.nan  # of these
        self.spread = 1.0 if self.ending else 1.0 + 2.0 * max(map(float, numbers), default=0.0)

    def answer(self) -> Answer:
        starts = [self._start(scale) for scale in _SCALES]
        losses = []
        for start in starts:
            value, gradients = self._gradient(start)
            losses.append(value if math.isfinite(value) else math.inf)
            for pull, g in zip(self.pull, gradients):
                pull += (g.abs() / (g.abs().max() + 1e-30)).nan_to_num()
        self.best, self.loss = self._optimise(starts[losses.index(min(losses))])
        if not any(bool(mask.any()) for mask in self.touched):
            return Answer((_NO_GRADIENT,))
        used = [self._is_changed_by(i, changed(t)) for i, t in enumerate(self.targets)]
        if not any(used):
            if not self.are_targets or any(map(self._is_input, self.targets)):
                raise AbstainError("the loss uses no targets, and the batch may have none")
            return Answer((_UNUSED,))
        readings = self._readings(used)
        problems: list[Problem] = []
        chosen: list[Reading] = []
        for index in dict.fromkeys(way.target for way in readings):
            ways = [way for way in readings if way.target == index]
            shares = [self._agreement(way, self.best) for way in ways]
            way = ways[shares.index(max(shares))]
            chosen.append(way)
            problems += self._problems(ways, way, max(shares))
            if len(ways) > 1 and way.space == "numbers" and self._is_mean_meant(ways):
                chosen += ways
        problems = problems or self._elsewhere({way.output for way in chosen})
        return Answer(tuple(problems), optimum=tuple(self._outputs(self.best)))

    def _is_input(self, target: Tensor) -> bool:
        return any(target.shape == x.shape and torch.equal(target, x) for x in self.inputs)

    def _readings(self, used: Sequence[bool]) -> list[Reading]:
        found: list[Reading] = []
        for index, target in enumerate(self.targets):
            ways = [way for i, o in enumerate(self.given) if (way := read(i, o, index, target)) is not None]
            if not used[index]:  # of several targets, one that is not used is missed where its output has no gradient
                is_input = self._is_input(target)
                ways = [w for w in ways if not is_input and not bool(self.touched[w.output].any())]
            elif not ways and target.is_floating_point() and bool((target < 0).any()):
                raise AbstainError("a tensor with both signs weighs the loss: rewards or the like")
            found += ways
        for way in found:
            if way.space == "classes" and used[way.target]:
                target = self.targets[way.target]
                classes = torch.arange(self.given[way.output].shape[way.dim], device=target.device)
                renamed = torch.where(way.valid, classes.roll(1)[target.masked_fill(~way.valid, 0)], target)
                if not self._is_changed_by(way.target, renamed):
                    raise AbstainError("the loss takes classes for groups of samples")
        if not found:
            raise AbstainError("the outputs are not in the space of the targets")
        if len({way.target for way in found}) > len({way.output for way in found}):
            raise AbstainError("several tensors of the batch may be the target of one output")
        return found

    def _agreement(self, way: Reading, free: Sequence[Tensor]) -> float:
        counted = way.by_target(self.touched[way.output]) & way.valid
        return way.agreement(self._outputs(free)[way.output], self.targets[way.target], counted)

    # What is wrong

    def _problems(self, ways: Sequence[Reading], way: Reading, share: float) -> list[Problem]:
        """Of one target: what is left out; or what the optimum is instead, and padding that counts."""
        is_found, shift, problem = self._shift(way)
        left_out = self._left_out(way, shift)
        if left_out is not None:
            return [left_out]
        if not is_found and share < ENOUGH and not self._is_meant(ways, way, share):
            problem = self._not_the_target(way, share)
        return [one for one in (problem, self._padding(way)) if one is not None]

    def _left_out(self, way: Reading, shift: int) -> Problem | None:
        target = self.targets[way.target]
        counted = way.by_target(self.touched[way.output])
        left_out = ~(counted.roll(shift, 1) if shift else counted) & way.valid
        if way.space == "classes" and target.dim() == 2:
            padded = padding_value(target)
            left_out &= (target != padded) if padded is not None else left_out
            if bool((left_out == left_out.all(0)).all()) and float(left_out.double().mean()) <= 0.5:
                return None  # a prompt, or the last token, which nothing follows
        if not bool(left_out.any()) or self._is_right_already(way, left_out):
            return None
        first = target[left_out][0]
        if way.space == "numbers" and bool(((target == first) == left_out).all()):
            return None  # a number that stands for what was not measured
        evidence = {"share": float(left_out.double().mean()), "num_left_out": int(left_out.sum())}
        remedy = "Look for a detach(), an index, a mask, a weight of zero or a clamp that leaves them out."
        by_sample = left_out.reshape(len(target), -1)
        what = f"{evidence['share']:.0%} of the outputs have"
        if bool((by_sample.all(1) == by_sample.any(1)).all()):
            what = f"{int(by_sample[:, 0].sum())} of {len(target)} samples have"
        if way.space == "classes":
            classes = target[left_out].unique()
            if not bool(torch.isin(target[~left_out & way.valid], classes).any()):
                what = f"Samples of class {', '.join(str(int(c)) for c in classes[:4])} have"
                remedy = "Look at `ignore_index` and at weights of zero."
        return Problem("left out", f"{what} no effect on the loss: it has no gradient there.", remedy, evidence)

    def _is_right_already(self, way: Reading, among: Tensor) -> bool:
        """Whether elements without a gradient are right where they began, which is why they have none."""
        target, output = self.targets[way.target], self._outputs(self.best)[way.output]
        if way.space != "binary":
            return way.agreement(output, target, among) >= ENOUGH
        output = output.reshape(target.shape)
        high, low = output[(target > 0) & ~among], output[(target <= 0) & ~among]
        if not high.numel() or not low.numel():
            return False
        is_high = output > 0.5 * (high.median() + low.median())
        return float((is_high == (target > 0))[among].double().mean()) >= ENOUGH

    def _is_meant(self, ways: Sequence[Reading], way: Reading, share: float) -> bool:
        """Whether an optimum that is not the target is no fault: one of several, or the outputs' mean is meant."""
        target = self.targets[way.target]
        if way.space == "numbers" and self.ending is not None:
            return False
        slack = 0.02 * abs(self._gradient(self._start(1.0))[0] - self.loss)
        if way.space == "numbers" and len(ways) > 1:
            return self._is_mean_meant(ways)
        for ideal in way.ideals(target, self.best[way.output]):
            at = [*self.best]
            at[way.output] = ideal
            if not self._gradient(at)[0] <= self.loss + slack:
                continue
            if way.space != "numbers":
                return share >= 0.7
            off = 0.5 * float(ideal.std())
            at[way.output] = ideal + off * torch.randn(ideal.shape, generator=self.dice).to(ideal.device)
            near = self._optimise(at, pace=0.3)[0]
            is_near = float((near[way.output] - ideal).abs().median()) < 0.4 * off
            return is_near or self._agreement(way, near) > 0.97
        return False

    def _is_mean_meant(self, ways: Sequence[Reading]) -> bool:
        """Whether the loss is as low where all these outputs are the target, and not where one alone is."""
        at, least = [*self.best], self.loss + 1e-3 * (1.0 + abs(self.loss))
        are_low = []
        for way in ways:
            at[way.output] = self.targets[way.target].float().reshape(self.best[way.output].shape)
            are_low.append(self._gradient(at)[0] <= least)
        return are_low[-1] and not are_low[0]

    def _not_the_target(self, way: Reading, share: float) -> Problem:
        told = f"are right in {share:.0%} of the places"
        if way.space != "classes":
            told = f"have a rank correlation of {share:.2f} with the targets"
            told = f"have yes above no in {share:.0%} of the pairs" if way.space == "binary" else told
        own, others = self._whose(way)
        why, remedy = "", "Check sign, arguments, dimension and mask: the loss is lowest where predictions are wrong."
        if others and not own:
            why = ": a sample is compared with the target of another one"
            remedy = "Look for a roll, a flip, an index or a shuffle of one side alone."
        elif others:
            why = ": a sample is compared with the targets of others as well"
            remedy = "Give outputs and targets the same shape, and take sums and softmax over the right dimension."
        if self.loss < 0.0 and self._gradient([4.0 * z for z in self.best])[0] < 2.0 * self.loss:
            why = f", and the loss has no lower bound{why}"
        evidence = {"agreement": share, "loss": self.loss, "threshold": ENOUGH}
        return Problem("target", f"Outputs that minimise the loss {told}{why}.", remedy, evidence, 0.93)

    def _whose(self, way: Reading) -> tuple[bool, bool]:
        """Whether a sample's gradient depends on its own target, and on that of another one."""
        target, free = self.targets[way.target], self._start(0.5)
        before = self._gradient(free)[1][way.output]
        own = others = False
        for sample in {0, 3 * (len(target) // 6), 3 * ((len(target) - 1) // 3)}:  # of those that `changed` changes
            targets = [*self.targets]
            row = changed(target)[sample]
            targets[way.target] = target.index_copy(0, torch.tensor([sample], device=target.device), row[None])
            moved = (self._gradient(free, targets=targets)[1][way.output] - before).abs() > 1e-4 * before.abs().max()
            by_sample = moved.reshape(len(moved), -1).any(1)
            own |= bool(by_sample[sample])
            others |= bool(by_sample.sum() > by_sample[sample])
        return own, others

    def _shift(self, way: Reading) -> tuple[bool, int, Problem | None]:
        """Of tokens: whether the optimum is the target some places on, how many, and the problem if that is wrong."""
        target = self.targets[way.target]
        if way.space != "classes" or target.dim() != 2:
            return False, 0, None
        decoded, counted = self.best[way.output].argmax(way.dim), way.by_target(self.touched[way.output])
        length, shares = target.shape[1], {}
        for k in range(-3, 4):
            here, there = slice(max(0, -k), length - max(0, k)), slice(max(0, k), length - max(0, -k))
            both = counted[:, here] & way.valid[:, there]
            if int(both.sum()) >= LEAST_SAMPLES:
                shares[k] = float((decoded[:, here] == target[:, there])[both].double().mean())
        found = max(shares, key=lambda k: shares[k], default=0)
        if shares.get(found, 0.0) < ENOUGH:
            return False, 0, None
        meant = 0
        for x in self.inputs:
            is_alike = x.shape == target.shape and x.dtype == target.dtype
            if is_alike and float((x == target)[way.valid].double().mean()) > 0.95:
                if not self.is_causal:
                    return found in (0, 1), found, None  # a copy, or a word that is left out: both are meant
                meant = 1
        if found == meant:
            return True, found, None
        what = "that which was given" if found == meant - 1 else f"that {found - meant:+d} places from it"
        problem = Problem(
            "target",
            f"Outputs that minimise the loss are not the token meant, but {what} ({shares[found]:.0%} of places).",
            "Shift logits and labels against each other once: in the loss, in the model or in the data.",
            {"shift": found, "meant": meant, "agreement": shares[found]},
            0.95,
        )
        return True, found, problem

    def _padding(self, way: Reading) -> Problem | None:
        """Whether positions that are padding, or have negative labels, have a gradient."""
        target = self.targets[way.target]
        ignored, what = ~way.valid, "to be ignored by their label"
        if way.space == "classes" and not bool(ignored.any()):
            padded = padding_value(target)
            is_padding = target == padded if padded is not None else ignored
            given = [x[is_padding] for x in self.inputs if x.shape == is_padding.shape and bool(is_padding.any())]
            is_same_input = any(float((x == x.mode().values).double().mean()) >= 0.5 for x in given)
            ignored, what = is_padding & is_same_input, f"padding ({padded})"
        pull = self.pull[way.output]
        pull = pull.sum(way.dim) if way.space == "classes" else pull.reshape(ignored.shape)
        others = pull[way.by_target(self.touched[way.output]) & ~ignored]
        least = 0.02 * float(others.median()) if others.numel() else 0.0  # less is a penalty on all outputs
        num_counted = int((ignored & (pull > least)).sum())
        share = num_counted / max(1, int(ignored.sum()))
        if share < 0.5:
            return None
        return Problem(
            "padding",
            f"{share:.0%} of the positions that are {what} count in the loss.",
            "Leave them out: `ignore_index`, or a mask by which losses are multiplied before they are averaged.",
            {"share": share, "num_counted": num_counted},
            0.85,
        )

    def _elsewhere(self, read_from: set[int]) -> list[Problem]:
        """Whether other outputs of the model bring the loss as low where the predictions are off."""
        best, loss = self.best, self.loss
        if len(read_from) == len(best):
            return []
        off = self._start(1.0)
        usual = abs(self._gradient(off)[0] - loss)
        for i in read_from:
            off[i] = best[i] + off[i] / self.spread * (best[i].std() + 1e-3)
        start = self._gradient(off)[0]
        elsewhere = self._gradient([off[i] if i in read_from else z for i, z in enumerate(best)])[0]
        if not elsewhere <= loss + 0.01 * usual:
            _, elsewhere = self._optimise(off, frozen=read_from)
        far = [off[i] if i in read_from else 100.0 * z for i, z in enumerate(best)]
        at_far = self._gradient(far)[0]
        elsewhere = min(value if math.isfinite(value) else math.inf for value in (elsewhere, at_far))
        if not elsewhere <= loss + 0.01 * abs(start - loss) and not elsewhere < start - 1e6 * (1.0 + abs(start)):
            return []
        problem = Problem(
            "elsewhere",
            f"The loss comes to {elsewhere:.3g} where predictions are wrong, by other outputs of the model, and to "
            f"{loss:.3g} where they are right.",
            "Look at the sign of the terms beside the prediction's: a divergence, a variance, a penalty.",
            {"wrong": elsewhere, "right": loss},
            0.85,
        )
        return [problem]

    # Free outputs under the loss

    def _start(self, scale: float) -> list[Tensor]:
        """Random outputs; `scale` is of the targets' size."""
        noise = [torch.randn(o.shape, generator=self.dice).to(o.device) for o in self.given]
        return [scale * self.spread * n for n in noise]

    def _outputs(self, free: Sequence[Tensor]) -> list[Tensor]:
        made = [z if self.ending is None else self.ending(z) for z in free]
        return [z.to(o.dtype, copy=True) for z, o in zip(made, self.given)]  # some losses write to what they get

    def _gradient(
        self, free: Sequence[Tensor], seed: int = _SEED, targets: Sequence[Tensor] | None = None
    ) -> tuple[float, list[Tensor]]:
        """The loss and its derivative; notes which outputs have one, if the targets are those given."""
        torch.manual_seed(seed)
        leaves = [z.detach().clone().requires_grad_() for z in free]
        loss = self.judge(self._outputs(leaves), self.targets if targets is None else targets)
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if loss.requires_grad:
            found = torch.autograd.grad(loss, leaves, allow_unused=True)
        gradients = [torch.zeros_like(z) if g is None else g for g, z in zip(found, leaves)]
        if targets is None:
            for mask, g in zip(self.touched, gradients):
                mask |= g != 0
        return float(loss.detach()), gradients

    def _optimise(
        self, start: Sequence[Tensor], frozen: set[int] | frozenset[int] = frozenset(), pace: float = 1.0
    ) -> tuple[list[Tensor], float]:
        """The outputs after some steps of Adam, whose rate falls to zero, and their loss; up to one not finite."""
        before = free = [z.clone() for z in start]
        first, second = [torch.zeros_like(z) for z in free], [torch.zeros_like(z) for z in free]
        loss, least = self._gradient(free)[0], 0.0
        if math.isnan(loss):
            raise AbstainError("the loss is not finite at outputs of usual size")
        for step in range(1, _NUM_STEPS + 1):
            if time.perf_counter() > self.deadline:
                raise AbstainError("the loss is too slow to be asked in the time")
            value, gradients = self._gradient(free, step)
            if not math.isfinite(value) or not all(bool(g.isfinite().all()) for g in gradients):
                return before, loss
            before, loss = [z.clone() for z in free], value
            sizes = torch.cat([g[g != 0].abs().flatten().float() for g in gradients])
            least = least or (1e-4 * float(sizes.median()) if sizes.numel() else 0.0)
            rate = 0.15 * pace * self.spread * min(1.0, 2.0 - 2.0 * step / (_NUM_STEPS + 1))
            for i, g in enumerate(gradients):
                if i not in frozen:
                    first[i].lerp_(g, 0.2)
                    second[i].lerp_(g.square(), 0.05)
                    scale = (second[i] / (1 - 0.95**step)).sqrt() + least + 1e-30
                    free[i] -= rate * first[i] / (1 - 0.8**step) / scale
        after = self._gradient(free)[0]
        return (free, after) if math.isfinite(after) else (before, loss)

    def _is_changed_by(self, index: int, target: Tensor) -> bool:
        """Whether the loss of random outputs, or its derivative, is another one with this target."""
        free, targets = self._start(0.5), [*self.targets]
        targets[index] = target
        (a, before), (b, after) = self._gradient(free), self._gradient(free, targets=targets)
        if abs(a - b) > 1e-5 * abs(a) + 1e-12:
            return True
        return not all(torch.allclose(x, y, rtol=1e-3, atol=1e-5 * float(x.abs().max())) for x, y in zip(before, after))


_NO_GRADIENT = Problem(
    "left out",
    "The model's outputs have no effect on the loss: no gradient arrives at any of them.",
    "Look for detach(), .item(), .data, argmax, round or a comparison between output and loss.",
    confidence=0.97,
)
_UNUSED = Problem(
    "target",
    "The targets have no effect on the loss.",
    "Give the loss the targets of the batch: it compares the outputs with something else.",
    confidence=0.8,
)
