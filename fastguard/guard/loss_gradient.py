"""What the gradient of the model's output says of loss and targets, which a guard does not see."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from .. import kernels
from ..activations.outputs import leaves
from ..stats.failures import Failures
from .dependence import Dependence

MAX_ROWS = 4096
NUM_LOOKED_AT = 8
_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 1e-2}  # what rounding does to rows and their sums
_USUAL_TOLERANCE = 2e-3
_LEAST_SMOOTHING = 5e-3
_ALL_BUT = 0.01  # elements that rounding may spoil
_LEAST_SAMPLES = 8
_MAX_ELEMENTS = 65536  # of an input that is held against the targets


class LossGradient:
    """Hooks on the output of some training passes, which read its gradient once: of eight passes at most.

    The gradient of a loss with respect to the model's output has a form of its own: of a cross-entropy its rows are a
    softmax less a one, of a squared error it is the distance from the targets. So the kind of the loss can be told, and
    the targets be found, up to a factor for what the loss is scaled by.

    Attributes:
        facts: `loss_kind` and what is known of the targets.
        is_late: whether passes were looked at before a run was resumed: what the first losses were is known then.

    Cost: a tensor hook, and 0.4 ms for an output of 8192 elements, at eight passes of a run.
    """

    def __init__(self, failures: Failures) -> None:
        self.facts: dict[str, Any] = {}
        self.is_late = False
        self._failures = failures
        self._left = NUM_LOOKED_AT
        self._kinds: Counter[str] = Counter()
        self._classes: Counter[int] = Counter()
        self._targets: list[tuple[float, float, float, float]] = []
        self._losses: list[float] = []
        self._tops: list[float] = []
        self._follows: list[torch.Tensor] | None = None
        self._num_held = 0
        self._dependence = Dependence()

    def watch(self, returned: Any, given: Sequence[torch.Tensor] = ()) -> None:
        """Has the gradient of the output looked at when it is there: of the first tensor with dimensions in it.

        Its targets are then held against what the model was `given`, which is kept until then.
        """
        if not self._left:
            return
        floating = [y for _, y in leaves(returned) if y.is_floating_point() and y.requires_grad]
        output = next((y for y in floating if y.dim()), None)
        if output is not None and type(output) is torch.Tensor and output.is_cpu and not _is_wrapped(output):
            self._left -= 1
            output.register_hook(_Look(self, output.detach(), tuple(x.detach() for x in given)))

    def look(self, output: torch.Tensor, gradient: torch.Tensor, given: Sequence[torch.Tensor] = ()) -> None:
        """Takes an output, the gradient of the loss with respect to it, and what the model was given."""
        with self._failures.kept("loss gradient", "The rules do not know what loss it is."), torch.no_grad():
            is_dense = gradient.shape == output.shape and gradient.layout is torch.strided and gradient.numel()
            if not is_dense or _is_wrapped(gradient) or kernels.lacks_memory(gradient) or kernels.lacks_memory(output):
                return
            kind, targets = kind_of_loss(output, gradient)
            self._kinds[kind] += 1
            self.facts["loss_kind"] = self._kinds.most_common(1)[0][0]
            if kind in CLASSIFYING and targets is not None:
                self._classes.update(targets.flatten().tolist())
                total = sum(self._classes.values())
                counts = Counter(targets.flatten().tolist())
                self._tops.append(counts.most_common(1)[0][1] / counts.total())
                self.facts["target_batch_top_share"] = sum(self._tops) / len(self._tops)
                self.facts["target_top_share"] = self._classes.most_common(1)[0][1] / total
                self.facts["num_target_classes"] = len(self._classes)
                self.facts["num_targets"] = total
                self.facts["target_entropy"] = _entropy(self._classes)
            elif targets is not None:
                self._take_numbers(targets, gradient)
            if targets is not None:
                self._hold_against(given, targets)
                dependence = self._dependence.add(given, targets, output)
                if dependence is not None:
                    self.facts["target_dependence"] = dependence

    def _hold_against(self, given: Sequence[torch.Tensor], targets: torch.Tensor) -> None:
        """How closely one place of the inputs follows the targets, in all passes."""
        found = [how_it_follows(x, targets) for x in given]
        if not any(map(len, found)):
            return
        before = found if self._follows is None else self._follows
        alike = [a.shape == b.shape for a, b in zip(before, found)]
        self._follows = [torch.minimum(a, b) if same else a[:0] for a, b, same in zip(before, found, alike)]
        self._num_held += 1
        if self._num_held >= 3:
            self.facts["target_in_inputs"] = max((float(x.max()) for x in self._follows if len(x)), default=0.0)

    def _take_numbers(self, targets: torch.Tensor, gradient: torch.Tensor) -> None:
        """The targets that a mean squared error would have, and the losses that would prove it to be one."""
        x = targets.double()
        self._targets.append((float(x.min()), float(x.max()), float(x.mean()), float(x.std(correction=0))))
        low, high, means, stds = zip(*self._targets)
        self.facts["target_range"] = (min(low), max(high))
        self.facts["target_mean"] = sum(means) / len(means)
        self.facts["target_std"] = sum(stds) / len(stds)
        away = gradient.double() * (gradient.numel() / 2.0)
        self._losses.append(float(away.square().mean()))
        if not self.is_late:
            self.facts["squared_losses"] = tuple(self._losses)
        ends = (x.abs() < 1e-3) | ((x - 1.0).abs() < 1e-3)
        self.facts["target_binary_share"] = float(ends.double().mean())


def _entropy(classes: Counter[int]) -> float:
    """Of the classes, in nats, with Miller and Madow's correction for their number."""
    total = classes.total()
    plain = -sum(number / total * math.log(number / total) for number in classes.values())
    return plain + (len(classes) - 1) / (2 * total)


class _Look:
    """The hook; keeps nothing alive but the values of output and inputs, until backward has passed."""

    def __init__(self, owner: LossGradient, output: torch.Tensor, given: tuple[torch.Tensor, ...]) -> None:
        self._owner = weakref.ref(owner)
        self._held: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = (output, given)

    def __call__(self, gradient: torch.Tensor) -> None:
        owner, held = self._owner(), self._held
        self._held = None
        if owner is not None and held is not None:
            owner.look(held[0], gradient, held[1])


def how_it_follows(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How closely each place of the inputs follows the targets, from 0 to 1.

    Of one target a sample, the size of the correlation with it of each of several features; of several, and inputs that
    are integers, the share of them that is equal, where the inputs are as many or a multiple. Empty of anything else.

    Args:
        x: [n, ...], an input.
        targets: of any shape, n of them or a multiple.

    >>> how_it_follows(torch.tensor([[1.0, 5.0], [2.0, 3.0], [3.0, 9.0]] * 3), torch.tensor([1, 3, 5] * 3))[0].item()
    1.0
    """
    nothing = torch.zeros(0, dtype=torch.float64, device="cpu")
    count, y = x.shape[0] if x.dim() else 0, targets.flatten()
    if count < _LEAST_SAMPLES or len(y) % count or x.numel() > _MAX_ELEMENTS or x.is_complex():
        return nothing
    each, features = len(y) // count, x.flatten(1)
    if each == 1 and features.shape[1] > 1:
        a, b = features.double() - features.double().mean(0), y.double() - y.double().mean()
        sizes = a.norm(dim=0) * b.norm()
        return torch.where(sizes > 0.0, (a.T @ b).abs() / sizes.clamp(min=1e-300), 0.0).nan_to_num_(0.0).clamp_(max=1.0)
    if each == 1 or x.is_floating_point() or features.shape[1] % each:
        return nothing
    rows = y.view(count, 1, each)
    if bool((rows == rows.flatten()[0]).all()):
        return nothing
    ways = features.view(count, -1, each), features.view(count, each, -1).transpose(1, 2)
    return torch.cat([(way == rows).double().mean((0, 2)) for way in ways])


SMOOTHED = "cross-entropy with smoothed labels"
CLASSIFYING = ("cross-entropy", "binary cross-entropy with logits", "binary cross-entropy", "log of the output",
               "negative log-likelihood", SMOOTHED)  # fmt: skip


def _is_wrapped(x: torch.Tensor) -> bool:
    """Whether `x` stands for many within vmap, or is followed by another transform of torch.func."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x)


def kind_of_loss(output: torch.Tensor, gradient: torch.Tensor) -> tuple[str, torch.Tensor | None]:
    """The kind of loss that has this gradient, and its targets: classes, or for a squared error numbers.

    Args:
        output: [..., C], what the loss was given.
        gradient: the same shape; of any scale.

    Returns:
        "cross-entropy" (its own softmax included), "cross-entropy with smoothed labels", "negative log-likelihood" (of
        the output as it is), "log of the output", "binary cross-entropy with logits", "binary cross-entropy", "squared
        error", "absolute error"; "zero" where all of it is zero, "" where it is none of them. A squared error is taken
        for one with the mean over all elements, and what fits nothing else counts as one until the losses tell; the
        others need no scale.

    >>> y = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 3.0]], requires_grad=True)
    >>> torch.nn.functional.cross_entropy(y, torch.tensor([0, 1])).backward()
    >>> kind, classes = kind_of_loss(y.detach(), y.grad)
    >>> kind, classes.tolist()
    ('cross-entropy', [0, 1])
    """
    tolerance = max(_TOLERANCE.get(x.dtype, _USUAL_TOLERANCE) for x in (output, gradient))
    y, g = output.detach().double(), gradient.detach().double()
    if not bool(g.any()):
        return "zero", None
    if not bool(torch.isfinite(y).all() and torch.isfinite(g).all()):
        return "", None
    if y.dim() > 1 and y.shape[-1] > 1:
        for rows, of in _as_rows(y, g):
            found = _of_classes(rows, of, tolerance)
            if found is not None:
                return found
    flat, grads = y.flatten()[: 16 * MAX_ROWS], g.flatten()[: 16 * MAX_ROWS]
    found = _of_pairs(flat, grads, tolerance)
    if found is not None:
        return found
    size = grads.abs()
    if bool((size[size > 0] - size.max()).abs().max() <= tolerance * size.max()):
        return "absolute error", None
    return "squared error", flat - grads * (output.numel() / 2.0)


def _as_rows(y: torch.Tensor, g: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """With the classes last, and, of more than two dimensions, with the classes second too, as cross_entropy has it."""
    width = y.shape[-1]
    pairs = [(y.reshape(-1, width)[:MAX_ROWS], g.reshape(-1, width)[:MAX_ROWS])]
    if y.dim() > 2 and y.shape[1] > 1:
        a, b = y.movedim(1, -1), g.movedim(1, -1)
        pairs.append((a.reshape(-1, a.shape[-1])[:MAX_ROWS], b.reshape(-1, b.shape[-1])[:MAX_ROWS]))
    return pairs


def _of_classes(y: torch.Tensor, g: torch.Tensor, tolerance: float) -> tuple[str, torch.Tensor] | None:
    used = g.abs().amax(1) > 0  # padding has no gradient
    y, g = y[used], g[used]
    if not len(y):
        return None
    num_negative = (g < 0).sum(1)
    largest = g.abs().amax(1, keepdim=True)
    classes = g.argmin(1)
    if bool(((g.abs() > 1e-12 * largest).sum(1) == 1).all()) and bool((num_negative == 1).all()):
        at = classes[:, None]
        scales = -(g.gather(1, at) * y.gather(1, at)).flatten()
        if _is_constant(scales, tolerance) and bool((scales > 0).all()) and len(scales) > 1:
            return "log of the output", classes
        if _is_constant(g.gather(1, at).flatten(), tolerance):
            return "negative log-likelihood", classes
        return None
    is_balanced = g.sum(1).abs() <= tolerance * largest.flatten()
    if float((~is_balanced).double().mean()) > _ALL_BUT:
        return None
    p = torch.softmax(y, 1)
    # A target that is more than sure already is pushed back: then the labels are what a usual scale leaves of p.
    for chosen in (classes, (p - g * len(g)).argmax(1), (p - g).argmax(1)):
        if _is_smoothed(g, p, chosen, tolerance):
            return SMOOTHED, chosen
    if float((num_negative != 1).double().mean()) > _ALL_BUT:
        return None
    away = p - torch.nn.functional.one_hot(classes, y.shape[1]).double()
    scale = (g * away).sum(1, keepdim=True) / away.square().sum(1, keepdim=True)
    return ("cross-entropy", classes) if _fit(g, scale * away, 10 * tolerance) else None


def _is_smoothed(g: torch.Tensor, p: torch.Tensor, classes: torch.Tensor, tolerance: float) -> bool:
    """Whether labels of (1 - C e) one + e explain the gradient, and those of e = 0 do not: with p - one = away, it then
    is a multiple of away + e (C one - 1)."""
    num_classes = g.shape[1]
    one = torch.nn.functional.one_hot(classes, num_classes).double()
    away, spread = p - one, num_classes * one - 1.0
    plain = float((g * away).sum() / away.square().sum()) * away
    left = float((g - plain).norm() / g.norm())
    if left < 0.25 * tolerance:
        return False
    a, b, c = float(away.square().sum()), float((away * spread).sum()), float(spread.square().sum())
    x, y = float((g * away).sum()), float((g * spread).sum())
    determinant = a * c - b * b
    if determinant <= 1e-9 * a * c:
        return False
    scale, share = (c * x - b * y) / determinant, (a * y - b * x) / determinant
    if scale <= 0.0 or not _LEAST_SMOOTHING < share / scale * num_classes < 0.5:
        return False
    smoothed = scale * away + share * spread
    return float((g - smoothed).norm() / g.norm()) < 0.5 * left and _fit(g, smoothed, 10 * tolerance)


def _fit(g: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Whether all but one in a hundred rows of `g` are as expected, to within a share of their largest."""
    fits = (g - expected).abs().amax(1) <= tolerance * g.abs().amax(1)
    return float((~fits).double().mean()) <= _ALL_BUT


def _of_pairs(y: torch.Tensor, g: torch.Tensor, tolerance: float) -> tuple[str, torch.Tensor] | None:
    if len(y) < 4:
        return None
    is_one = g < 0
    p = torch.sigmoid(y)
    if _is_constant(torch.where(is_one, -g / (1 - p).clamp_min(1e-12), g / p.clamp_min(1e-12)), tolerance):
        return "binary cross-entropy with logits", is_one.long()
    if bool(((y >= 0) & (y <= 1)).all()) and _is_constant(torch.where(is_one, -g * y, g * (1 - y)), tolerance):
        return "binary cross-entropy", is_one.long()
    return None


def _is_constant(x: torch.Tensor, tolerance: float) -> bool:
    """Whether all but one in a hundred of `x` are their median, to within rounding."""
    middle = float(x.median())
    if middle == 0.0 or not math.isfinite(middle):
        return False
    off = (x / middle - 1.0).abs() > 10 * tolerance
    return float(off.double().mean()) <= _ALL_BUT
