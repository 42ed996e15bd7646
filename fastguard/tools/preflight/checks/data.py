"""Inputs and targets: scale, NaN, what is constant, what is the same twice, what gives the answer away."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ....diagnosis import Finding
from ....observers.batch_sample import is_mask
from ..evidence import Evidence
from ..losses import YES_OR_NO, has_indices, labels, num_classes
from ..registry import check
from ..watcher import REGRESSION
from .output import is_one_hot

TITLE = "Inputs and targets"
_MOST = 1 << 20  # elements of a tensor that are looked at


def _rows(tensor: Tensor) -> Tensor:
    """As [samples, features], float64; of a large tensor the first samples."""
    flat = tensor.detach().reshape(tensor.shape[0], -1) if tensor.dim() else tensor.detach().reshape(1, 1)
    return flat[: max(1, _MOST // max(1, flat.shape[1]))].double()


def _float_inputs(evidence: Evidence) -> Tensor | None:
    """All batches' inputs as [samples, features]; None where they are no floating tensors of one width."""
    rows = [_rows(t) for t in evidence.inputs if t.is_floating_point() and t.dim() >= 1 and t.numel()]
    if not rows or any(r.shape[1] != rows[0].shape[1] for r in rows):
        return None
    return torch.cat(rows)


@check(
    "non-finite-inputs",
    cause="bad-batch",
    severity="critical",
    reads="all floating tensors of the batches",
    source="a NaN among the inputs makes every gradient NaN",
    remedy="Find the samples, and drop or fill them; look for 0/0 in the normalisation of constant features.",
)
def non_finite_inputs(evidence: Evidence) -> Finding | None:
    """Inputs or targets hold NaN or Inf."""
    for what, tensors in (("inputs", evidence.inputs), ("targets", evidence.targets)):
        bad = sum(int((~torch.isfinite(t)).sum()) for t in tensors if t.is_floating_point() and not is_mask(t))
        if bad:
            total = sum(t.numel() for t in tensors)
            return Finding(
                f"{bad} of {total} elements of the {what} are NaN or Inf.",
                severity="critical",
                evidence={"num_nonfinite": bad, "num_elements": total},
                confidence=0.98,
            )
    return None


@check(
    "inputs-out-of-scale",
    cause="unnormalised-inputs",
    reads="what the first layer with weights is given",
    source="LeCun et al. 1998, section 4.3; DeepDiagnosis and UMLAUT ask for [-1, 1]",
    remedy="Subtract each feature's mean and divide by its standard deviation, as measured on the training data.",
)
def inputs_out_of_scale(
    evidence: Evidence, *, largest_rms: float = 20.0, smallest_rms: float = 0.01, spread: float = 300.0
) -> Finding | None:
    """What the first layer with weights is given has a root mean square above `largest_rms` or below `smallest_rms`.

    Or some feature's standard deviation is `spread` times that of the median feature, and above 1. Read behind
    embeddings and normalisation layers: what these mend is no fault.
    """
    given = evidence.layers[0].input if evidence.layers else None
    if given is None or not given.is_floating_point() or not given.numel() or given.shape[0] < 2:
        return None
    rows = _rows(given)
    if not bool(torch.isfinite(rows).all()):
        return None
    rms = float(rows.square().mean().sqrt())
    stds = rows.std(0)
    varying = stds[stds > 0]
    relative = float(varying.max() / varying.median()) if varying.numel() > 1 and rows.shape[0] >= 8 else 1.0
    is_spread = relative > spread and float(varying.max()) > 1.0
    if not rms or (smallest_rms <= rms <= largest_rms and not is_spread):
        return None
    how = "far from 1" if not is_spread else f"and one feature varies {relative:.0f} times as much as the median one"
    return Finding(
        f"The first layer is given values of root mean square {rms:.3g}, up to {float(rows.abs().max()):.3g}: {how}.",
        layers=(evidence.layers[0].name,),
        evidence={"rms": rms, "largest": float(rows.abs().max()), "spread": relative, "threshold": largest_rms},
        confidence=0.85 if rms < 3 * largest_rms or is_spread else 0.92,
    )


@check(
    "targets-out-of-scale",
    cause="unnormalised-targets",
    reads="targets of a regression",
    source="LeCun et al. 1998, section 4.5; the first steps of a regression learn mean and scale",
    remedy="Train on (target - mean) / std, and undo it for predictions.",
)
def targets_out_of_scale(
    evidence: Evidence, *, largest_rms: float = 20.0, smallest_rms: float = 0.003, offset: float = 10.0
) -> Finding | None:
    """The root mean square of a regression's targets is above `largest_rms` or below `smallest_rms`.

    Or their mean is more than `offset` standard deviations from 0, and above 3. Only a remark where the trial steps
    at the given learning rate come below the loss of the best constant answer: the rate is up to it.
    """
    call = evidence.call
    if call is not None and call.kind not in REGRESSION:
        return None
    targets = [t for t in evidence.targets if t.is_floating_point() and t.numel()]
    if not targets or (call is None and evidence.output is None):
        return None
    t = torch.cat([one.reshape(-1).double() for one in targets])
    rms, std, mean = float(t.square().mean().sqrt()), float(t.std()) if t.numel() > 1 else 0.0, float(t.mean())
    output = evidence.output
    at_start = 0.0 if output is None or not output.numel() else float(output.detach().double().square().mean().sqrt())
    if at_start > 0.1 * rms > 0.1 * largest_rms:
        return None  # the model undoes the scale itself
    if not rms or not math.isfinite(rms) or not std:
        return None
    is_far = abs(mean) > offset * std and abs(mean) > 3.0
    if smallest_rms <= rms <= largest_rms and not is_far:
        return None
    return Finding(
        f"The targets have mean {mean:.3g} and standard deviation {std:.3g}; the model's first outputs are "
        f"{'smaller by far' if rms > 1 else 'larger by far'}.",
        severity="info" if _gets_there(evidence) else "warning",
        evidence={"mean": mean, "std": std, "rms": rms, "threshold": largest_rms},
        confidence=0.88,
    )


def _gets_there(evidence: Evidence) -> bool:
    """Whether the trial steps at the given rate come below the best constant answer's loss."""
    fit = evidence.fit
    return fit is not None and evidence.baseline is not None and fit.given.end < evidence.baseline


@check(
    "constant-inputs",
    cause="repeated-data",
    severity="critical",
    reads="features of the inputs, over all samples that were taken",
    source="what is the same in all samples tells nothing about one",
    remedy="Look at what the loader gives, sample by sample: is one sample repeated, is it all padding or zeros?",
)
def constant_inputs(evidence: Evidence, *, least_samples: int = 4) -> Finding | None:
    """All samples have the same inputs: of at least `least_samples`, and over all batches."""
    same, total = True, 0
    shapes = {t.shape[1:] for t in evidence.inputs}
    if not evidence.inputs or len(shapes) != 1:
        return None
    first = evidence.inputs[0][:1]
    for t in evidence.inputs:
        if not t.dim():
            return None
        total += t.shape[0]
        same = same and bool((t == first).all())
    if not same or total < least_samples:
        return None
    return Finding(
        f"All {total} samples have the same inputs.",
        severity="critical",
        evidence={"num_samples": total},
        confidence=0.95,
    )


@check(
    "constant-targets",
    cause="trivial-targets",
    severity="critical",
    reads="targets of all batches that were taken",
    source="the best answer is a constant, whatever the input",
    remedy="Look at single samples with their targets: is the wrong column read, is the data sorted by class?",
)
def constant_targets(evidence: Evidence, *, least_samples: int = 8) -> Finding | None:
    """All targets are the same: of at least `least_samples`, over all batches."""
    targets = [t.detach() for t in evidence.targets if t.numel() and t.dim()]
    if not targets or sum(t.shape[0] for t in targets) < least_samples:
        return None
    if evidence.call is None and evidence.bench.form != "pair":
        return None
    first = targets[0][:1]
    if not all(t.shape[1:] == first.shape[1:] and bool((t == first).all()) for t in targets):
        return None
    value = f"{float(first.reshape(-1)[0]):.3g}" if first.numel() == 1 else "the same row"
    return Finding(
        f"All {sum(t.shape[0] for t in targets)} targets are {value}: there is nothing to learn about the inputs.",
        severity="critical",
        evidence={"num_targets": sum(t.shape[0] for t in targets)},
        confidence=0.93,
    )


@check(
    "batches-of-one-class",
    cause="unshuffled-data",
    reads="labels of all batches that were taken",
    source='Bottou 2012, "Stochastic gradient descent tricks": shuffle the examples',
    remedy="Shuffle: DataLoader(..., shuffle=True).",
)
def batches_of_one_class(evidence: Evidence, *, least_samples: int = 8) -> Finding | None:
    """Each batch of at least `least_samples` holds a single class, and there are several batches or another class."""
    calls = [call for call in evidence.calls if has_indices(call)]
    if len(calls) < 2 or len(calls) != len(evidence.batches):
        return None
    found = [labels(call) for call in calls]
    if any(f.numel() < least_samples or bool((f != f[0]).any()) for f in found) or len({int(f[0]) for f in found}) < 2:
        return None
    return Finding(
        f"Each of the first {len(found)} batches holds a single class: {', '.join(str(int(f[0])) for f in found)}.",
        evidence={"classes": [int(f[0]) for f in found]},
        confidence=0.9,
    )


@check(
    "rare-classes",
    cause="imbalanced-targets",
    reads="labels of all batches that were taken",
    source='He and Garcia 2009; DeepCrime (Humbatova et al. 2021), operator "unbalance"',
    remedy="Weight the loss by class (weight=, pos_weight=), or sample rare classes more often.",
)
def rare_classes(evidence: Evidence, *, share: float = 0.9, least_samples: int = 32) -> Finding | None:
    """One class has more than `share` of at least `least_samples` samples.

    Not told where the loss has weights, and of labels of pixels or tokens (more than one a sample).
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
    return Finding(
        f"{top:.0%} of the targets are class {int(counts.argmax())}: always saying that is right as often.",
        evidence={"share": top, "threshold": share, "num_samples": int(found.numel())},
        confidence=0.85,
    )


def _classes(target: object, kind: str, given: Tensor) -> Tensor:
    """One class a sample; empty where there are several, or none."""
    none = torch.empty(0, dtype=torch.long, device="cpu")
    if not isinstance(target, Tensor) or not target.dim() or int(target.shape[0]) != target.numel():
        return target.argmax(-1) if isinstance(target, Tensor) and target.dim() == 2 and is_one_hot(target) else none
    flat = target.detach().reshape(-1)
    is_classes = kind in YES_OR_NO or kind in ("cross_entropy", "nll_loss")
    if not is_classes or bool((flat != flat.round()).any()) or bool((flat < 0).any()):
        return none
    if given.dim() > 1 and given.shape[1] > 1000:  # a vocabulary
        return none
    return flat.long()


@check(
    "target-among-inputs",
    cause="trivial-targets",
    reads="correlation of each feature with the targets",
    source='Kaufman et al. 2012, "Leakage in data mining"',
    remedy="Take the feature out: it is the answer, or made of it.",
)
def target_among_inputs(evidence: Evidence, *, correlation: float = 0.9999, least_samples: int = 16) -> Finding | None:
    """A feature of the inputs is the target, up to scale and offset: correlation above `correlation`.

    Over at least `least_samples` samples, of inputs [samples, features] with one target a sample.
    """
    inputs = _float_inputs(evidence)
    if inputs is None or evidence.inputs[0].dim() != 2 or len(evidence.targets) != len(evidence.inputs):
        return None
    targets = [t.argmax(-1) if is_one_hot(t, 3) else t for t in evidence.targets]
    if any(t.numel() != t.shape[0] for t in targets if t.dim()) or inputs.shape[1] < 2:
        return None
    t = torch.cat([t.reshape(-1).double() for t in targets])
    if t.numel() != inputs.shape[0] or t.numel() < least_samples or not bool(torch.isfinite(inputs).all()):
        return None
    x, t = inputs - inputs.mean(0), t - t.mean()
    scale = x.norm(dim=0) * t.norm()
    found = torch.where(scale > 1e-12, (x * t[:, None]).sum(0) / scale, torch.zeros_like(scale)).abs()
    if not float(found.max()) > correlation:
        return None
    return Finding(
        f"Feature {int(found.argmax())} of the inputs is the target itself, up to scale and offset: their correlation "
        f"is {float(found.max()):.6g}.",
        evidence={"feature": int(found.argmax()), "correlation": float(found.max()), "threshold": correlation},
        confidence=0.92,
    )


@check(
    "tiny-batch",
    cause="batch-size",
    reads="samples and targets of a batch",
    source="AUTOTRAINER (Zhang et al. 2021), oscillating loss: SGD with momentum on batches of 1",
    remedy="Use batches of 16 to 256 samples, or accumulate gradients over several.",
)
def tiny_batch(evidence: Evidence, *, most_samples: int = 2) -> Finding | None:
    """A batch holds `most_samples` at most, with as few targets: every step follows a single answer."""
    sizes = [t.shape[0] for t in evidence.inputs if t.dim()]
    if not sizes or max(sizes) > most_samples or not evidence.targets:
        return None
    call = evidence.call
    if call is None or not isinstance(call.target, Tensor):
        return None
    most = most_samples * (num_classes(call) if not has_indices(call) else 1)
    if call.target.numel() > most or call.target.numel() == 0:
        return None
    return Finding(
        f"A batch holds {max(sizes)} sample{'' if max(sizes) == 1 else 's'}: the loss of a step says little about the "
        "next one's.",
        evidence={"num_samples": max(sizes)},
        confidence=0.7,
    )
