"""What the gradient of the model's output says of loss and targets, which a guard does not see."""

from __future__ import annotations

import math
import weakref
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from .. import kernels
from ..records.failures import Failures
from .activations.outputs import leaves
from .dependence import Dependence, InputSample, equal_at, how_it_follows, sample_inputs
from .loss_kind import CLASSIFYING, LEAST_BYTES, Loss, OutputSample

NUM_LOOKED_AT = 8
_EACH = 4  # targets of a class, on average: fewer, of a sample, say nothing of how frequent classes are


class LossGradient:
    """Hooks on the output of some training passes, which read its gradient once: of eight passes at most.

    The gradient of a loss with respect to the model's output has a form of its own: of a cross-entropy its rows are a
    softmax less a one, of a squared error it is the distance from the targets. So the kind of the loss can be told, and
    the targets be found, up to a factor for what the loss is scaled by.

    A pass that is looked at copies a sample of output and inputs, 1 MiB or 1 % of the output at most, and gives it to a
    hook on the output: neither output nor inputs live longer than they would. The backward pass reads the gradient in
    place.

    Attributes:
        facts: `loss_kind` and what is known of the targets.
        is_late: whether passes were looked at before a run was resumed: what the first losses were is known then.

    Cost: a tensor hook, and 0.1 ms for an output of 640 elements, a few ms for one of millions, at eight passes of a
    run.
    """

    def __init__(self, failures: Failures) -> None:
        self.facts: dict[str, Any] = {}
        self.is_late = False
        self._failures = failures
        self._left = NUM_LOOKED_AT
        self._kinds: Counter[str] = Counter()
        self._classes: Counter[float] = Counter()
        self._numbers: list[tuple[float, ...]] = []
        self._losses: list[float] = []
        self._tops: list[float] = []
        self._follows: list[array[float]] | None = None
        self._num_held = 0
        self._dependence = Dependence()

    def watch(self, returned: Any, given: Sequence[torch.Tensor] = ()) -> None:
        """Has the gradient of the output looked at when it is there: of the first tensor with dimensions in it.

        Its targets are then held against what the model was `given`.
        """
        if not self._left:
            return
        floating = [y for _, y in leaves(returned) if y.is_floating_point() and y.requires_grad]
        output = next((y for y in floating if y.dim()), None)
        if output is not None and type(output) is torch.Tensor and output.is_cpu and _is_dense(output):
            self._left -= 1
            sample = OutputSample(output.detach())
            output.register_hook(
                _Look(self, sample, sample_inputs(given, max(LEAST_BYTES // 4, LEAST_BYTES - sample.num_bytes)))
            )

    def look(self, sample: OutputSample, gradient: torch.Tensor, given: Sequence[InputSample] = ()) -> None:
        """Takes samples of an output and of the inputs, and the gradient of the loss with respect to the output."""
        with self._failures.kept("loss gradient", "The rules do not know what loss it is."), torch.no_grad():
            if gradient.shape != sample.shape or not _is_dense(gradient):
                return
            loss = sample.loss_of(gradient)
            self._kinds[loss.kind] += 1
            self.facts["loss_kind"] = self._kinds.most_common(1)[0][0]
            if loss.targets is None:
                return
            has_classes = loss.kind in CLASSIFYING
            if has_classes:
                self._take_classes(loss.targets, loss.is_sampled)
            else:
                self._take_numbers(loss)
            self._hold_against(given, loss.targets, loss)
            dependence = self._dependence.add(given, loss.targets, sample.shape, not has_classes)
            if dependence is not None:
                self.facts["target_dependence"] = dependence

    def _hold_against(self, given: Sequence[InputSample], targets: array[float], loss: Loss) -> None:
        """How closely one place of the inputs follows the targets, in all passes."""
        found = [array("d")] * len(given)
        for i, x in enumerate(given):
            if x.values is not None and x.is_whole and len(targets) == loss.num_rows:
                found[i] = how_it_follows(x.values, targets)
            elif x.values is not None and x.is_whole and loss.places:
                found[i] = equal_at(x.values, targets, loss.places, loss.num_rows)
        if not any(found):
            return
        before = found if self._follows is None else self._follows
        self._follows = [array("d", map(min, a, b)) if len(a) == len(b) else a[:0] for a, b in zip(before, found)]
        self._num_held += 1
        if self._num_held >= 3:
            self.facts["target_in_inputs"] = max(map(max, filter(None, self._follows)), default=0.0)

    def _take_classes(self, targets: array[float], is_sampled: bool) -> None:
        """How frequent they are, in this batch and in all."""
        counts = Counter(targets)
        self._classes.update(counts)
        self._tops.append(max(counts.values()) / counts.total())
        total = self._classes.total()
        self.facts["target_batch_top_share"] = sum(self._tops) / len(self._tops)
        self.facts["target_top_share"] = max(self._classes.values()) / total
        self.facts["num_target_classes"] = len(self._classes)
        self.facts["num_targets"] = total
        if not is_sampled or total >= _EACH * len(self._classes):
            self.facts["target_entropy"] = _entropy(self._classes)

    def _take_numbers(self, loss: Loss) -> None:
        """The targets that a mean squared error would have, and the losses that would prove it to be one."""
        self._numbers.append(loss.numbers)
        low, high, means, stds, ends = zip(*self._numbers)
        self.facts["target_range"] = (min(low), max(high))
        self.facts["target_mean"] = sum(means) / len(means)
        self.facts["target_std"] = sum(stds) / len(stds)
        self.facts["target_binary_share"] = ends[-1]
        self._losses.append(loss.mean_squared)
        if not self.is_late and all(map(math.isfinite, self._losses)):
            self.facts["squared_losses"] = tuple(self._losses)


def _entropy(classes: Counter[float]) -> float:
    """Of the classes, in nats, with Miller and Madow's correction for their number."""
    total = classes.total()
    plain = -sum(number / total * math.log(number / total) for number in classes.values())
    return plain + (len(classes) - 1) / (2 * total)


class _Look:
    """The hook; drops its samples in the backward pass, and goes with the output where there is none."""

    def __init__(self, owner: LossGradient, output: OutputSample, given: list[InputSample]) -> None:
        self._owner = weakref.ref(owner)
        self._held: tuple[OutputSample, list[InputSample]] | None = (output, given)

    def __call__(self, gradient: torch.Tensor) -> None:
        owner, held = self._owner(), self._held
        self._held = None
        if owner is not None and held is not None:
            owner.look(held[0], gradient, held[1])


def _is_dense(x: torch.Tensor) -> bool:
    """Whether `x` has elements in memory with strides: it is not sparse, nor followed by a transform of torch.func."""
    functorch = torch._C._functorch
    is_wrapped = functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x)
    return not is_wrapped and x.layout is torch.strided and x.numel() > 0 and not kernels.lacks_memory(x)
