"""Which parameters the gradient reaches, and which the optimizer moves."""

from __future__ import annotations

from torch import nn

from ...._text import listed
from ....diagnosis import Finding
from ...batches import tensors_in
from ..evidence import Evidence
from ..registry import check

TITLE = "Parameters and gradients"


def _counted(names: list[str], of: int) -> str:
    return f"{len(names)} of {of} parameter tensors" if len(names) != 1 else f"1 of {of} parameter tensors"


def _in_a_list(evidence: Evidence, name: str) -> str:
    """The list that a parameter's module is chosen from; empty if none."""
    modules = evidence.modules
    path = name.split(".")
    for end in range(len(path) - 1, 0, -1):
        holder = ".".join(path[: end - 1])
        if isinstance(modules.get(holder), (nn.ModuleList, nn.ModuleDict)):
            return holder
    return ""


@check(
    "gradient-does-not-arrive",
    cause="parameters-cut-off",
    severity="critical",
    reads="gradients of all parameters after each batch's backward pass",
    source="the graph of autograd",
    remedy="Look for detach(), .data, no_grad(), argmax, item() on the way, and for modules that forward() leaves out.",
)
def gradient_does_not_arrive(evidence: Evidence) -> Finding | None:
    """Trainable parameters get no gradient from any of the batches; critical if none gets any.

    Only a remark on modules of a ModuleList (or a ModuleDict) of which others get one: what is chosen from is not all
    used at once.
    """
    if evidence.first.error is not None or evidence.first.num_losses != 1:
        return None
    trainable = evidence.trainable
    if not trainable:
        return None
    if not evidence.first.requires_grad:
        missing = list(trainable)
    else:
        passes = [p for p in evidence.passes if p.error is None]
        missing = [name for name in trainable if all(p.gradients.get(name) is None for p in passes)]
    if not missing:
        return None
    is_all = len(missing) == len(trainable)
    reached = {_in_a_list(evidence, name) for name in trainable if name not in missing} - {""}
    is_choice = all(_in_a_list(evidence, name) in reached for name in missing)
    if is_choice:
        return Finding(
            f"No gradient arrives at {_counted(missing, len(trainable))}, of modules in a list others of which were "
            "used: experts, or heads, that this data does not choose?",
            severity="info",
            layers=tuple(missing[:8]),
            evidence={"num_missing": len(missing), "num_trainable": len(trainable)},
            confidence=0.5,
        )
    return Finding(
        f"No gradient arrives at {_counted(missing, len(trainable))}: the loss does not depend on "
        f"{'them' if len(missing) > 1 else 'it'}.",
        severity="critical" if is_all else "warning",
        layers=tuple(missing[:8]),
        evidence={"num_missing": len(missing), "num_trainable": len(trainable)},
        confidence=0.96 if is_all else 0.9,
    )


@check(
    "left-out-of-optimizer",
    cause="parameters-missing-from-optimizer",
    severity="critical",
    reads="the model's trainable parameters and the optimizer's",
    source="what is not in param_groups is not updated",
    remedy="Make the optimizer from model.parameters() after the model is complete, or add_param_group the rest.",
)
def left_out_of_optimizer(evidence: Evidence) -> Finding | None:
    """Trainable parameters of the model that get a gradient are not in the optimizer; critical if most are."""
    trainable = evidence.trainable
    missing = [name for name, p in trainable.items() if id(p) not in evidence.in_optimizer]
    if evidence.first.requires_grad:
        missing = [name for name in missing if evidence.first.gradients.get(name) is not None]
    if not missing:
        return None
    return Finding(
        f"The optimizer does not have {_counted(missing, len(trainable))} of the model: {listed(missing)}.",
        severity="critical" if 2 * len(missing) > len(trainable) else "warning",
        layers=tuple(missing[:8]),
        evidence={"num_missing": len(missing), "num_trainable": len(trainable)},
        confidence=0.97,
    )


@check(
    "strangers-in-optimizer",
    cause="parameters-missing-from-optimizer",
    severity="critical",
    reads="the optimizer's parameters, and whether the gradient reaches them",
    source="TrainCheck (Jiang et al. 2025), case AC-2665: the optimizer holds parameters of before",
    remedy="Make the optimizer after the model is moved, wrapped or loaded, from the parameters that it has then.",
)
def strangers_in_optimizer(evidence: Evidence) -> Finding | None:
    """The optimizer has parameters that are not the model's, and no gradient reaches them."""
    own = {id(p) for p in evidence.parameters.values()}
    strangers = [p for key, p in evidence.in_optimizer.items() if key not in own]
    lost = len(strangers) - evidence.first.num_outsiders_reached
    if lost <= 0 or not evidence.first.requires_grad:
        return None
    return Finding(
        f"{lost} of the optimizer's {len(evidence.in_optimizer)} parameter tensors are not the model's, and no "
        "gradient reaches them.",
        severity="critical" if lost == len(evidence.in_optimizer) else "warning",
        evidence={"num_strangers": lost, "num_in_optimizer": len(evidence.in_optimizer)},
        confidence=0.96 if lost == len(evidence.in_optimizer) else 0.7,
    )


@check(
    "frozen-in-optimizer",
    cause="frozen-parameters",
    reads="requires_grad of the optimizer's parameters, and of all the model's",
    source="TrainCheck (Jiang et al. 2025), case forum84911: nothing but BatchNorm trains",
    remedy="Set requires_grad_(True) on what shall train; leave out of the optimizer what is frozen on purpose.",
)
def frozen_in_optimizer(evidence: Evidence) -> Finding | None:
    """Parameters that the optimizer has are frozen; or all are but those of normalisation layers and biases."""
    frozen = [name for name, p in evidence.parameters.items() if not p.requires_grad]
    if not frozen:
        return None
    held = [name for name in frozen if id(evidence.parameters[name]) in evidence.in_optimizer]
    matrices = [p for p in evidence.parameters.values() if p.dim() >= 2]
    only_small = bool(matrices) and not any(p.requires_grad for p in matrices)
    if not held and not only_small:
        return None
    told = held or frozen
    what = "and the optimizer has them all the same" if held else "and nothing but norms and biases is left to train"
    return Finding(
        f"{_counted(told, len(evidence.parameters))} are frozen, {what}: {listed(told)}.",
        severity="critical" if only_small else "warning",
        layers=tuple(told[:8]),
        evidence={"num_frozen": len(told), "num_parameters": len(evidence.parameters)},
        confidence=0.93 if held else 0.7,
    )


@check(
    "all-gradients-zero",
    cause="dead-units",
    depth=2,
    severity="critical",
    reads="gradients of all batches",
    source="a step along a gradient of 0 goes nowhere",
    remedy="Look where the gradient ends: units that answer nothing, an output that is constant, a loss met already.",
)
def all_gradients_zero(evidence: Evidence) -> Finding | None:
    """Every gradient of every batch is exactly zero, and the loss is not."""
    if not evidence.ran or not evidence.first.requires_grad or evidence.first.loss == 0.0:
        return None
    found = [g for p in evidence.passes for g in p.gradients.values() if g is not None]
    if not found or any(bool(g.any()) for g in found):
        return None
    return Finding(
        f"The loss is {evidence.first.loss:.3g}, and every gradient is exactly zero.",
        severity="critical",
        evidence={"loss": evidence.first.loss, "num_gradients": len(found)},
        confidence=0.4,
    )


@check(
    "samples-mixed",
    cause="samples-mixed",
    severity="critical",
    reads="derivatives of one sample's output by the inputs of the others, in evaluation mode",
    source='Karpathy 2019, "A recipe for training neural networks": use backprop to chart dependencies',
    remedy="Look for view() or reshape() that runs over the batch, a wrong dim, batch_first.",
)
def samples_mixed(evidence: Evidence) -> Finding | None:
    """In evaluation mode the first sample's output has a derivative by the inputs of other samples.

    It is exactly zero where samples are apart, so there is no threshold. Asked of a pair of inputs and one target a
    sample. Not of models that hold or are given a matrix over the samples (graphs), and not where targets are
    sequences: those may lie along the first dimension.
    """
    if evidence.bench.form != "pair" or not evidence.ran:
        return None
    tensors, targets = tensors_in(evidence.bench.parts(evidence.batches[0])[0]), evidence.targets
    if len(tensors) != 1 or not targets or tensors[0].dim() < 2 or tensors[0].shape[0] < 3:
        return None
    size = tensors[0].shape[0]
    is_by_sample = targets[0].dim() >= 1 and targets[0].shape[0] == size and targets[0].dim() <= 2
    if tensors[0].dim() >= 3 and targets[0].dim() == 2 and targets[0].shape[1] == tensors[0].shape[1]:
        is_by_sample = False  # [time, samples], perhaps
    if not tensors[0].is_floating_point() and targets[0].dim() >= 2:
        is_by_sample = False
    buffers = [t for t in evidence.bench.model.buffers() if t.dim() >= 2]
    if not is_by_sample or any(t.shape[-1] == t.shape[-2] == size for t in buffers):
        return None
    norms = [m for m in evidence.bench.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    share = evidence.flow.across_samples
    if not share or any(norm.running_mean is None for norm in norms):  # these use the batch's statistics always
        return None
    return Finding(
        f"A sample's output depends on the inputs of {share:.0%} of the other samples in its batch.",
        severity="critical",
        evidence={"share": share, "num_samples": size},
        confidence=0.93,
    )


@check(
    "leaks-from-the-future",
    cause="trivial-targets",
    severity="critical",
    reads="derivatives of a position's output by the inputs of later positions, in evaluation mode; targets",
    source="a derivative that is exactly zero: the output cannot depend on that input",
    remedy="Give attention a causal mask, a convolution padding on the left, a recurrent layer one direction.",
)
def leaks_from_the_future(evidence: Evidence) -> Finding | None:
    """The targets are the next inputs of a sequence, and outputs have a derivative by later inputs: the answers."""
    if not evidence.ran or evidence.flow.is_causal is not False or not evidence.inputs or not evidence.targets:
        return None
    given, target = evidence.inputs[0], evidence.targets[0]
    if given.dim() < 2 or target.shape[:2] != given.shape[:2] or target.dtype != given.dtype or len(given[0]) < 4:
        return None
    same = given[:, 1:] == target[:, :-1]
    valid = (target[:, :-1] >= 0) & (given[:, 1:] != given[:, :-1])
    if not bool(valid.any()) or not float(same[valid].double().mean()) > 0.95:
        return None
    return Finding(
        "The targets are the next inputs, and the model sees them: its outputs depend on later positions.",
        severity="critical",
        evidence={"share_of_next": float(same[valid].double().mean())},
        confidence=0.95,
    )
