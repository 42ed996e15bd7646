"""Inputs and targets: scale, NaN, constants, repeated samples, and features that give the answer away."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ....diagnosis.finding import Seen
from ....observers.batch_sample import is_mask
from ..asking import check
from ..evidence import Evidence
from ..losses import YES_OR_NO, has_indices, labels
from ..watcher import REGRESSION
from .output import is_one_hot

TITLE = "Inputs and targets"
_MOST = 1 << 20  # elements of a tensor that are read


def _rows(tensor: Tensor) -> Tensor:
    """As [samples, features], float64; only the first samples of a large tensor."""
    flat = tensor.detach().reshape(tensor.shape[0], -1) if tensor.dim() else tensor.detach().reshape(1, 1)
    return flat[: max(1, _MOST // max(1, flat.shape[1]))].double()


def _are_all_the_same(tensors: list[Tensor]) -> bool:
    """Whether all samples of all tensors are equal."""
    if not tensors or any(not t.dim() or t.shape[1:] != tensors[0].shape[1:] for t in tensors):
        return False
    return all(bool((t == tensors[0][:1]).all()) for t in tensors)


@check(
    "non-finite-inputs",
    cause="bad-batch",
    severity="critical",
    see="{num_nonfinite} of {num_elements} elements of the {_what} are NaN or Inf.",
    sure=0.98,
    reads="all floating tensors of the batches",
    source="a NaN among the inputs makes every gradient NaN",
    remedy="Find the samples and drop or fill them; look for 0/0 in the normalisation of constant features.",
)
def non_finite_inputs(evidence: Evidence) -> Seen | None:
    """Inputs or targets contain NaN or Inf."""
    for what, tensors in (("inputs", evidence.inputs), ("targets", evidence.targets)):
        bad = sum(int((~torch.isfinite(t)).sum()) for t in tensors if t.is_floating_point() and not is_mask(t))
        if bad:
            return Seen(num_nonfinite=bad, num_elements=sum(t.numel() for t in tensors), _what=what)
    return None


@check(
    "inputs-out-of-scale",
    cause="unnormalised-inputs",
    like="input-scale",
    see="The input of the first layer has a root mean square of {rms:.3g} and values up to {largest:.3g}: {_how}.",
    reads="the input of the first layer with weights",
    source="LeCun et al. 1998, section 4.3; DeepDiagnosis and UMLAUT ask for [-1, 1]",
)
def inputs_out_of_scale(
    evidence: Evidence, *, largest_rms: float = 20.0, smallest_rms: float = 0.01, spread: float = 300.0
) -> Seen | None:
    """The input of the first layer with weights has a root mean square above `largest_rms` or below `smallest_rms`.

    Or the standard deviation of a feature is above 1, and `spread` times that of the median feature. Read behind
    embeddings and normalisation layers, which correct the scale.
    """
    given = evidence.layers[0].input if evidence.layers else None
    if given is None or not given.is_floating_point() or not given.numel() or given.shape[0] < 2:
        return None
    rows = _rows(given)
    if not bool(torch.isfinite(rows).all()):
        return None
    rms, largest, stds = float(rows.square().mean().sqrt()), float(rows.abs().max()), rows.std(0)
    varying = stds[stds > 0]
    relative = float(varying.max() / varying.median()) if varying.numel() > 1 and rows.shape[0] >= 8 else 1.0
    is_spread = relative > spread and float(varying.max()) > 1.0
    if not rms or (smallest_rms <= rms <= largest_rms and not is_spread):
        return None
    return Seen(
        rms=rms,
        largest=largest,
        spread=relative,
        threshold=largest_rms,
        layers=[evidence.layers[0].name],
        sure=0.85 if rms < 3 * largest_rms or is_spread else 0.92,
        _how=f"one feature varies {relative:.0f} times as much as the median one" if is_spread else "far from 1",
    )


@check(
    "targets-out-of-scale",
    cause="unnormalised-targets",
    like="target-scale",
    see="The targets have mean {mean:.3g} and standard deviation {std:.3g}; the model's first outputs are far {_size}.",
    sure=0.88,
    reads="targets of a regression",
    source="LeCun et al. 1998, section 4.5; the first steps of a regression learn mean and scale",
)
def targets_out_of_scale(
    evidence: Evidence, *, largest_rms: float = 20.0, smallest_rms: float = 0.003, offset: float = 10.0
) -> Seen | None:
    """The root mean square of a regression's targets is above `largest_rms` or below `smallest_rms`.

    Or their mean is above 3, and more than `offset` standard deviations from 0. Info if the trial steps at the given
    learning rate reach the loss of the best constant answer.
    """
    call, output = evidence.call, evidence.output
    if call is not None and call.kind not in REGRESSION:
        return None
    targets = [t for t in evidence.targets if t.is_floating_point() and t.numel()]
    if not targets or (call is None and output is None):
        return None
    t = torch.cat([one.reshape(-1).double() for one in targets])
    rms, std, mean = float(t.square().mean().sqrt()), float(t.std()) if t.numel() > 1 else 0.0, float(t.mean())
    at_start = 0.0 if output is None or not output.numel() else float(output.detach().double().square().mean().sqrt())
    if at_start > 0.1 * rms > 0.1 * largest_rms:
        return None  # the model scales its output itself
    if not rms or not math.isfinite(rms) or not std:
        return None
    if smallest_rms <= rms <= largest_rms and not (abs(mean) > offset * std and abs(mean) > 3.0):
        return None
    fit = evidence.fit
    gets_there = fit is not None and evidence.baseline is not None and fit.given.end < evidence.baseline
    size = "smaller" if rms > 1 else "larger"
    return Seen(mean=mean, std=std, rms=rms, threshold=largest_rms, warn=not gets_there, _size=size)


@check(
    "constant-inputs",
    cause="repeated-data",
    like="same-inputs",
    severity="critical",
    see="All {num_samples} samples have the same inputs.",
    sure=0.95,
    reads="features of the inputs, over all samples of the batches",
    source="features that are the same for all samples say nothing about one of them",
)
def constant_inputs(evidence: Evidence, *, least_samples: int = 4) -> Seen | None:
    """All samples of all batches, at least `least_samples`, have the same inputs."""
    total = sum(t.shape[0] for t in evidence.inputs if t.dim())
    if total < least_samples or not _are_all_the_same(evidence.inputs):
        return None
    return Seen(num_samples=total)


@check(
    "constant-targets",
    cause="trivial-targets",
    severity="critical",
    see="All {num_targets} targets are {_value}, so there is nothing to learn from the inputs.",
    sure=0.93,
    reads="targets of all batches",
    source="the best answer is a constant, whatever the input",
    remedy="Look at single samples with their targets: is the wrong column read, is the data sorted by class?",
)
def constant_targets(evidence: Evidence, *, least_samples: int = 8) -> Seen | None:
    """All targets of all batches, at least `least_samples`, are the same."""
    targets = [t.detach() for t in evidence.targets if t.numel() and t.dim()]
    total = sum(t.shape[0] for t in targets)
    if total < least_samples or (evidence.call is None and evidence.bench.form != "pair"):
        return None
    if not _are_all_the_same(targets):
        return None
    first = targets[0][:1]
    return Seen(
        num_targets=total, _value=f"{float(first.reshape(-1)[0]):.3g}" if first.numel() == 1 else "the same row"
    )


@check(
    "batches-of-one-class",
    cause="unshuffled-data",
    like="sorted-targets",
    see="Each of the first {_num} batches contains a single class: {classes}.",
    sure=0.9,
    reads="labels of all batches",
    source='Bottou 2012, "Stochastic gradient descent tricks": shuffle the examples',
)
def batches_of_one_class(evidence: Evidence, *, least_samples: int = 8) -> Seen | None:
    """Each of several batches, of at least `least_samples`, contains a single class, and not all the same one."""
    found = [labels(call) for call in evidence.calls if has_indices(call)]
    if len(found) < 2 or len(found) != len(evidence.batches):
        return None
    if any(f.numel() < least_samples or bool((f != f[0]).any()) for f in found) or len({int(f[0]) for f in found}) < 2:
        return None
    return Seen(classes=[int(f[0]) for f in found], _num=len(found))


@check(
    "rare-classes",
    cause="imbalanced-targets",
    like="uneven-targets",
    see="{share:.0%} of the targets are class {_most}: always predicting it is right as often.",
    reads="labels of all batches",
    source='He and Garcia 2009; DeepCrime (Humbatova et al. 2021), operator "unbalance"',
)
def rare_classes(evidence: Evidence, *, share: float = 0.9, least_samples: int = 32) -> Seen | None:
    """One class has more than `share` of at least `least_samples` samples.

    Silent if the loss has weights, and for labels of pixels or tokens (several per sample).
    """
    call = evidence.call
    if call is None or call.options.get("weight") is not None or call.options.get("pos_weight") is not None:
        return None
    found = torch.cat([_classes(c.target, call.kind, c.input) for c in evidence.calls])
    if found.numel() < least_samples:
        return None
    counts = torch.bincount(found)
    top = float(counts.max() / counts.sum())
    if top <= share or int((counts > 0).sum()) < 2:
        return None
    return Seen(share=top, threshold=share, num_samples=int(found.numel()), _most=int(counts.argmax()))


def _classes(target: object, kind: str, given: Tensor) -> Tensor:
    """One class per sample; empty if there are several, or none."""
    none = torch.empty(0, dtype=torch.long, device="cpu")
    if not isinstance(target, Tensor) or not target.dim() or int(target.shape[0]) != target.numel():
        return target.argmax(-1) if isinstance(target, Tensor) and target.dim() == 2 and is_one_hot(target) else none
    flat = target.detach().reshape(-1)
    is_classes = kind in YES_OR_NO or kind in ("cross_entropy", "nll_loss")
    if not is_classes or bool((flat != flat.round()).any()) or bool((flat < 0).any()):
        return none
    is_vocabulary = given.dim() > 1 and given.shape[1] > 1000
    return none if is_vocabulary else flat.long()


@check(
    "target-among-inputs",
    cause="trivial-targets",
    like="answer-in-inputs",
    see="Feature {feature} of the inputs is the target, up to scale and offset: the correlation is {correlation:.6g}.",
    sure=0.92,
    reads="correlation of each feature with the targets",
    source='Kaufman et al. 2012, "Leakage in data mining"',
)
def target_among_inputs(evidence: Evidence, *, correlation: float = 0.9999, least_samples: int = 16) -> Seen | None:
    """A feature of the inputs is the target, up to scale and offset: their correlation is above `correlation`.

    Over at least `least_samples` samples, with inputs [samples, features] and one target per sample.
    """
    if not evidence.inputs or len(evidence.targets) != len(evidence.inputs):
        return None
    width = evidence.inputs[0].shape[-1] if evidence.inputs[0].dim() == 2 else 0
    if width < 2 or any(not x.is_floating_point() or x.shape[1:] != (width,) for x in evidence.inputs):
        return None
    x = torch.cat(list(map(_rows, evidence.inputs)))
    targets = [t.argmax(-1) if is_one_hot(t, 3) else t for t in evidence.targets]
    if any(t.numel() != t.shape[0] for t in targets if t.dim()):
        return None
    t = torch.cat([t.reshape(-1).double() for t in targets])
    if t.numel() != x.shape[0] or t.numel() < least_samples or not bool(torch.isfinite(x).all()):
        return None
    x, t = x - x.mean(0), t - t.mean()
    scale = x.norm(dim=0) * t.norm()
    found = torch.where(scale > 1e-12, (x * t[:, None]).sum(0) / scale, torch.zeros_like(scale)).abs()
    if not float(found.max()) > correlation:
        return None
    return Seen(feature=int(found.argmax()), correlation=float(found.max()), threshold=correlation)
