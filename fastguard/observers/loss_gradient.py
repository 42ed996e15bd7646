"""What the graph of a loss and the gradient of the model's output say about loss and targets."""

from __future__ import annotations

import math
import weakref
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.cpu import extension
from ..records.failures import Failures
from .batch_sample import Dependence, InputSample, equal_at, how_it_follows, sample_inputs
from .graph import MAX_NODES, nodes_of
from .sequences import Sequences
from .tensors import can_be_read, index_of, leaves

CLASSIFYING = (
    *("cross-entropy", "cross-entropy with smoothed labels", "negative log-likelihood", "log of the output"),
    *("binary cross-entropy with logits", "binary cross-entropy"),
)
_KINDS = ("", "zero", *CLASSIFYING, "absolute error", "squared error")  # LossKind in csrc/loss_gradient.h
_MAX_ELEMENTS, _MAX_ROWS = 65536, 4096
_MAX_READ = 1 << 22  # elements of the gradient, for targets of rows that are not in the sample
LEAST_BYTES, _SHARE = 1 << 20, 100
NUM_LOOKED_AT = 8
_EACH = 4  # targets of a class, on average: with fewer, a sample says nothing about the frequency of classes
NUM_OPS = 16
_NEAR = 4  # nodes, in which the softmax of a loss is
_MEETING = ("SubBackward0", "MulBackward0", "DivBackward0")
_REDUCING = ("MeanBackward0", "SumBackward0", "NegBackward0", "PowBackward0", "AbsBackward0", "AddBackward0")
# Operations whose derivative is finite wherever they are. So is a quotient's where the divisor has no graph (one of
# zero would have made the loss infinite), and a power's from 1 on.
_NAMES = """
    AccumulateGrad Add Addmm Addmv Alias AsStrided Baddbmm Bmm Cat Clone Copy Expand Gather Index IndexSelect
    Linear Mm Mul Mv Neg Permute Repeat Roll Select Slice Split SplitWithSizes Squeeze Stack Sub T ToCopy
    Transpose Unbind UnsafeView Unsqueeze View ViewAs ReshapeAlias Mean Sum MaskedFill Where Embedding Relu
    LeakyRelu Elu Gelu Silu Mish Hardtanh Sigmoid Tanh Softplus LogSoftmax Softmax NllLoss NllLoss2D NllLossNd
    MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropyWithLogits Dropout NativeDropout NativeLayerNorm
    NativeBatchNorm NativeGroupNorm Convolution MaxPool2DWithIndices AvgPool2D AdaptiveAvgPool2D
    ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention ScaledDotProductEfficientAttention
    ScaledDotProductAttentionMath
"""
_SMOOTH = frozenset(_NAMES.split())


class Rows(NamedTuple):
    """Every `step`-th row along dimension `dim` of a tensor, `num` from `start` on; single elements if it is None."""

    dim: int | None
    start: int
    step: int
    num: int

    @classmethod
    def spread(cls, shape: Sequence[int], dim: int | None, most: int) -> Rows:
        """At most `most` rows. The step is odd: an even one would meet the same places of every sequence or image."""
        num_rows = math.prod(shape) // (1 if dim is None else shape[dim])
        step = -(-num_rows // most)
        step += step > 1 and step % 2 == 0
        return cls(dim, step // 2, step, len(range(step // 2, num_rows, step)))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of them, [num, width]."""
        table = x.unsqueeze(-1) if self.dim is None else x if self.dim == x.dim() - 1 else x.movedim(self.dim, -1)
        width, end = table.shape[-1], self.start + self.step * self.num
        if self.num * width == x.numel():
            return table.clone(memory_format=torch.contiguous_format).view(-1, width)
        if table.is_contiguous():
            return table.view(-1, width)[self.start : end : self.step].clone()
        places = torch.arange(self.start, end, self.step, device=x.device)
        return table[index_of(places, table.shape[:-1])]


class Loss(NamedTuple):
    """What a gradient says about the loss."""

    # One of `CLASSIFYING`, "absolute error", "squared error" (a mean over all elements, which anything else counts as,
    # too, until the losses rule it out), "zero" if the gradient is zero, or "" if it fits none or is not finite.
    kind: str
    targets: array[float] | None = None  # classes, or the numbers of a squared error; only of rows with a gradient
    places: array[float] | None = None  # of classes, the row of each, out of `num_rows`
    num_rows: int = 0
    is_sampled: bool = False  # whether the targets are a sample of the rows
    mean_squared: float = math.nan  # what a mean squared error would be; NaN above 2^24 elements
    numbers: tuple[float, ...] = ()  # of a squared error's targets: least, largest, mean, std, share of 0 and 1


class OutputSample:
    """Copies some rows of a model's output in the forward pass, so that nothing has to hold the output itself.

    It copies an output of up to 65,536 elements whole. It takes as many elements of a larger one, up to eight rows if
    they are wide, and at most max(1 MiB, 1 % of the output). The classes of other rows come from the gradient alone.
    """

    def __init__(self, output: torch.Tensor) -> None:
        self.shape = output.shape
        self._samples = [(rows, rows.take(output), self._reach(rows)) for rows in _sampled(output)]
        self.num_bytes = sum(values.nbytes for _, values, _ in self._samples)  # of the copies

    def _reach(self, rows: Rows) -> Rows:
        """Rows of the gradient to read if the sample is not the whole output."""
        none = Rows(rows.dim, 0, 2, 0)
        if rows.step == 1:
            return none
        most = _MAX_READ if rows.dim is None else max(1, min(_MAX_ROWS, _MAX_READ // self.shape[rows.dim]))
        reach = Rows.spread(self.shape, rows.dim, most)
        return reach if reach.num > 2 * min(rows.num, _MAX_ROWS) else none

    def loss_of(self, gradient: torch.Tensor) -> Loss:
        """What the gradient, of the output's shape and any scale, says of the loss. Cost: 20 us to a few ms."""
        samples = [
            (values, -1 if rows.dim is None else rows.dim, *rows[1:3], *reach[1:])
            for rows, values, reach in self._samples
        ]
        found = extension.kind_of_loss(samples, gradient, torch.get_num_threads())
        if found is None:
            return Loss("")
        kind, targets, places, num_rows, is_sampled, mean_squared, *numbers = found
        classes = array("d", targets) if targets else None
        return Loss(_KINDS[kind], classes, array("d", places), num_rows, is_sampled, mean_squared, tuple(numbers))


def _sampled(output: torch.Tensor) -> Iterator[Rows]:
    """With the classes last, and of more than two dimensions with the classes second too, as cross_entropy has it."""
    shape, itemsize = output.shape, output.itemsize
    most_bytes = max(LEAST_BYTES, output.numel() * itemsize // _SHARE)
    width = shape[-1] if len(shape) > 1 else 1
    fitting = most_bytes // 2 // (width * itemsize)
    if width == 1 or not fitting:
        yield Rows.spread(shape, None, _MAX_ELEMENTS)
    else:
        yield Rows.spread(shape, len(shape) - 1, max(_MAX_ELEMENTS // width, min(8, fitting)))
    if len(shape) > 2 and width > 1 and shape[1] > 1:
        fitting = most_bytes // 4 // (shape[1] * itemsize)
        if fitting:
            yield Rows.spread(shape, 1, min(_MAX_ROWS, fitting))


class LossGradient:
    """Reads the gradient of the model's output in up to eight training passes: it shows the loss and the targets.

    For a cross-entropy its rows are a softmax minus a one-hot vector, for a squared error the distance from the
    targets. In such a pass it copies a sample of output and inputs, at most max(1 MiB, 1 % of the output), for a hook
    on the output; neither lives longer than without it.

    Cost: a tensor hook, and 0.1 ms for an output of 640 elements, a few ms for one of millions, at eight passes of a
    run.
    """

    def __init__(self, failures: Failures) -> None:
        self.facts: dict[str, Any] = {}  # `loss_kind`, and what is known about the targets
        self.is_late = False  # the run was resumed after the first passes, so the first losses are known already
        self._failures = failures
        self._left = NUM_LOOKED_AT
        self._kinds: Counter[str] = Counter()
        self._classes: Counter[float] = Counter()
        self._tops: list[float] = []  # the share of the most frequent class of each batch
        self._numbers: list[tuple[float, ...]] = []
        self._losses: list[float] = []
        self._follows: list[array[float]] | None = None
        self._num_held = 0
        self._dependence = Dependence()
        self._sequences = Sequences()

    def watch(self, returned: Any, given: Sequence[torch.Tensor] = ()) -> None:
        """Sets a hook on the first tensor with dimensions in `returned`, to compare targets with the inputs `given`."""
        if not self._left or extension is None:
            return
        made = [y for _, y in leaves(returned) if y.is_floating_point() and y.requires_grad and y.dim()]
        output = made[0] if made else None
        if output is None or type(output) is not torch.Tensor or not can_be_read(output) or not output.numel():
            return
        self._left -= 1
        sample = OutputSample(output.detach())
        inputs = sample_inputs(given, max(LEAST_BYTES // 4, LEAST_BYTES - sample.num_bytes))
        self._sequences.has_code |= any(y.dim() == 2 for y in made[1:])
        held, ref = [(sample, inputs)], weakref.ref(self)

        def look(gradient: torch.Tensor) -> None:  # drops the samples; goes with the output where it is not called
            owner = ref()
            while held:
                sample, inputs = held.pop()
                if owner is not None:
                    owner.look(sample, gradient, inputs)

        output.register_hook(look)

    def look(self, sample: OutputSample, gradient: torch.Tensor, given: Sequence[InputSample] = ()) -> None:
        """Reads the gradient of the loss with respect to an output, given samples of the output and of the inputs."""
        with self._failures.kept("loss gradient", "The rules do not know what loss it is."), torch.no_grad():
            if gradient.shape != sample.shape or not can_be_read(gradient):
                return
            loss = sample.loss_of(gradient)
            self._kinds[loss.kind] += 1
            self.facts["loss_kind"] = self._kinds.most_common(1)[0][0]
            if loss.targets is None:
                return
            has_classes = loss.kind in CLASSIFYING
            self.facts.update(self._of_classes(loss.targets, loss) if has_classes else self._of_numbers(loss))
            self._hold_against(given, loss.targets, loss)
            dependence = self._dependence.add(given, loss.targets, sample.shape, not has_classes)
            if dependence is not None:
                self.facts["target_dependence"] = dependence
            if loss.places:
                self._sequences.add(gradient, loss.targets, loss.places, loss.num_rows)
                self.facts["target_shift"] = self._sequences.found

    def _hold_against(self, given: Sequence[InputSample], targets: array[float], loss: Loss) -> None:
        """Notes how closely one place of the inputs follows the targets in all passes."""
        found = [array("d")] * len(given)
        for i, x in enumerate(given):
            if x.values is None or not x.is_whole:
                continue
            # Later sequences are a decoder's, or the targets of a loss within the model; `Sequences` knows which.
            if i and not x.values.is_floating_point() and loss.num_rows > len(x.values):
                continue
            if len(targets) == loss.num_rows:
                found[i] = how_it_follows(x.values, targets)
            elif loss.places and not i:
                found[i] = equal_at(x.values, targets, loss.places, loss.num_rows)
        if not any(found):
            return
        before = found if self._follows is None else self._follows
        self._follows = [array("d", map(min, a, b)) if len(a) == len(b) else a[:0] for a, b in zip(before, found)]
        self._num_held += 1
        if self._num_held >= 3:
            self.facts["target_in_inputs"] = max(map(max, filter(None, self._follows)), default=0.0)

    def _of_classes(self, targets: array[float], loss: Loss) -> dict[str, Any]:
        """How frequent they are, in this batch and in all."""
        counts = Counter(targets)
        self._classes.update(counts)
        self._tops.append(max(counts.values()) / counts.total())
        total = self._classes.total()
        facts = {
            "target_batch_top_share": sum(self._tops) / len(self._tops),
            "target_top_share": max(self._classes.values()) / total,
            "num_target_classes": len(self._classes),
            "num_targets": total,
        }
        if not loss.is_sampled or total >= _EACH * len(self._classes):
            entropy = -sum(number / total * math.log(number / total) for number in self._classes.values())
            # with the correction by Miller and Madow for the number of classes
            facts["target_entropy"] = entropy + (len(self._classes) - 1) / (2 * total)
        return facts

    def _of_numbers(self, loss: Loss) -> dict[str, Any]:
        """The targets that a mean squared error would have, and the losses that would confirm it."""
        self._numbers.append(loss.numbers)
        self._losses.append(loss.mean_squared)
        low, high, means, stds, ends = zip(*self._numbers)
        facts: dict[str, Any] = {
            "target_range": (min(low), max(high)),
            "target_mean": sum(means) / len(means),
            "target_std": sum(stds) / len(stds),
            "target_binary_share": ends[-1],
        }
        is_known = not self.is_late and all(map(math.isfinite, self._losses))
        return {**facts, "squared_losses": tuple(self._losses)} if is_known else facts


def facts_of_loss(loss: Any, parameters: Collection[int] | None) -> dict[str, Any]:
    """Facts about a loss by its graph, such as `loss_ops` and `num_foreign_parameters`; empty if it has none.

    `parameters` are ids of those of the model and of guarded optimizers; None without a model. After backward the graph
    still exists. Cost: 1 us a node, of at most 4096. No sync.
    """
    if not isinstance(loss, torch.Tensor) or loss.grad_fn is None:
        return {}
    chain = chain_of(loss.grad_fn)
    ops = tuple(node.name().rpartition("::")[2] for node in chain)
    if parameters is None:
        return {"loss_ops": ops}
    nodes = nodes_of(loss.grad_fn)
    terms = [node.next_functions[0][0] for node in nodes if node.name().startswith("NllLoss")]
    return {
        "loss_ops": ops,
        "is_smooth": len(nodes) < MAX_NODES and all(map(_is_smooth, nodes)),
        "num_foreign_parameters": len(parameters_of_loss(loss).keys() - parameters),
        "softmax_over_batch": any(map(_is_over_batch, [*chain[:_NEAR], *filter(None, terms)])),
        "has_loss_weights": any(map(_has_weights, chain[:_NEAR])),
        "is_paired": _is_paired(chain),
    }


def _is_paired(chain: Sequence[Any]) -> bool:
    """Whether an output [N, 1] or [N] meets numbers of the other shape, and all N x N pairs are reduced at once."""
    for node in chain:
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        if len(edges) == 1 and node.name() in _MEETING:
            (made, *_), (other, place) = node._input_metadata, edges[0]
            size = tuple(made.shape)
            if len(size) == 2 and size[0] == size[1] > 1:
                return math.prod(other._input_metadata[place].shape) == size[0]
        if node.name() not in (*_MEETING, *_REDUCING):
            break
    return False


def _has_weights(node: Any) -> bool:
    """Whether a cross-entropy was given weights of classes or elements."""
    try:
        weights = [getattr(node, name, None) for name in ("_saved_weight", "_saved_pos_weight")]
    except RuntimeError:  # the backward pass has freed them
        weights = [True]
    return weights != [None, None] and node.name().startswith(("NllLoss", "BinaryCrossEntropy"))


def _is_over_batch(node: Any) -> bool:
    """Whether a softmax is taken over the first of several dimensions."""
    metadata = getattr(node, "_input_metadata", None) if "Softmax" in node.name() else None
    num_dims = len(metadata[0].shape) if metadata else 0
    return num_dims > 1 and node._saved_dim in (0, 2**64 - num_dims)  # as an unsigned number


def parameters_of_loss(loss: Any) -> dict[int, tuple[weakref.ref[torch.Tensor], int]]:
    """The parameters in the graph of a loss and their versions, by their ids. Cost: as of `facts_of_loss`."""
    leaves = (getattr(node, "variable", None) for node in nodes_of(getattr(loss, "grad_fn", None)))
    return {id(p): (weakref.ref(p), p._version) for p in leaves if isinstance(p, torch.nn.Parameter)}


def _is_smooth(node: Any) -> bool:
    name = node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")
    if name == "Div":
        return len(node.next_functions) < 2 or node.next_functions[1][0] is None
    if name == "Pow":
        exponent = getattr(node, "_saved_exponent", None)
        return isinstance(exponent, (int, float)) and exponent >= 1
    return name in _SMOOTH


def chain_of(node: Any) -> list[Any]:
    """The nodes of autograd from one down, at most 16, along the first argument that has a graph."""
    found: list[Any] = []
    while node is not None and len(found) < NUM_OPS:
        found.append(node)
        following = (function for function, _ in node.next_functions if function is not None)
        node = next((one for one in following if not one.name().endswith("AccumulateGrad")), None)
    return found
