"""Which parameters the gradient reaches, which the optimizer moves, and how: settings, modes, precision."""

from __future__ import annotations

from typing import Any

from torch import nn

from ....diagnosis.finding import Seen
from ....diagnosis.rules.setup import odd_settings
from ...bench import tensors_in
from ..asking import check
from ..evidence import Evidence

TITLE = "Parameters, gradients and settings"
_DECOUPLED = ("AdamW", "Lion", "SGDW", "Adafactor", "Muon")
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
_DROPOUTS = (nn.modules.dropout._DropoutNd,)


def _in_a_list(evidence: Evidence, name: str) -> str:
    """The ModuleList or ModuleDict that holds a parameter's module; "" if none does."""
    path, lists = name.split("."), (nn.ModuleList, nn.ModuleDict)
    holders = (".".join(path[:end]) for end in reversed(range(len(path) - 1)))
    return next((one for one in holders if isinstance(evidence.modules.get(one), lists)), "")


def _modules(evidence: Evidence, kinds: tuple[type, ...]) -> dict[str, Any]:
    return {name: m for name, m in evidence.bench.model.named_modules() if isinstance(m, kinds)}


@check(
    "gradient-does-not-arrive",
    cause="parameters-cut-off",
    severity="critical",
    see="No gradient arrives at {num_missing} of {num_trainable} parameter tensors, so the loss does not depend on "
    "them: {layers}.",
    remedy="Look for detach(), .data, no_grad(), argmax, item() on the way, and for modules that forward() leaves out.",
)
def gradient_does_not_arrive(evidence: Evidence) -> Seen | None:
    """Trainable parameters get no gradient from any of the batches; critical if none gets any.

    Info for modules of a ModuleList or ModuleDict in which others get one: they may be chosen by the data.
    """
    first, trainable = evidence.first, evidence.trainable
    passes = [p for p in evidence.passes if p.error is None and first.requires_grad]
    missing = [name for name in trainable if all(p.gradients.get(name) is None for p in passes)]
    if first.error is not None or first.num_losses != 1 or not missing:
        return None
    counts: dict[str, Any] = {"num_missing": len(missing), "num_trainable": len(trainable), "layers": missing}
    reached = {_in_a_list(evidence, name) for name in trainable if name not in missing} - {""}
    if all(_in_a_list(evidence, name) in reached for name in missing):
        see = "No gradient arrives at {num_missing} of {num_trainable} parameter tensors. Others of the same list get "
        see += "one: are these experts or heads that this data does not choose?"
        return Seen(see=see, warn=False, sure=0.5, **counts)
    is_all = len(missing) == len(trainable)
    return Seen(severity="critical" if is_all else "warning", sure=0.96 if is_all else 0.9, **counts)


@check(
    "left-out-of-optimizer",
    cause="parameters-missing-from-optimizer",
    like="untrained-parameters",
    severity="critical",
    see="The optimizer lacks {num_missing} of the model's {num_trainable} trainable parameters{_more}: {layers}.",
    sure=0.97,
    source="what is not in param_groups is not updated; TrainCheck (Jiang et al. 2025), case AC-2665",
)
def left_out_of_optimizer(evidence: Evidence) -> Seen | None:
    """Trainable parameters of the model that get a gradient are not in the optimizer; critical if most are.

    The optimizer may hold other tensors instead, which no gradient reaches: those of before the model was moved,
    wrapped or loaded.
    """
    trainable, total = evidence.trainable, len(evidence.in_optimizer)
    missing = [name for name, p in trainable.items() if id(p) not in evidence.in_optimizer]
    if evidence.first.requires_grad:
        missing = [name for name in missing if evidence.first.gradients.get(name) is not None]
    if not missing:
        return None
    own = {id(p) for p in evidence.parameters.values()}
    lost = max(0, sum(key not in own for key in evidence.in_optimizer) - evidence.first.num_outsiders_reached)
    counts: dict[str, Any] = {"num_missing": len(missing), "num_trainable": len(trainable), "num_strangers": lost}
    more = f", and {lost} of its {total} tensors are not in the model" if lost else ""
    is_most = 2 * len(missing) > len(trainable)
    return Seen(severity="critical" if is_most else "warning", layers=missing, _more=more, **counts)


@check(
    "all-gradients-zero",
    cause="dead-units",
    depth=2,
    severity="critical",
    see="The loss is {loss:.3g}, but every gradient is exactly zero.",
    sure=0.4,
    remedy="Look where the gradient ends: dead units, a constant output, a loss that is already at its minimum.",
)
def all_gradients_zero(evidence: Evidence) -> Seen | None:
    """Every gradient of every batch is exactly zero, and the loss is not."""
    if not evidence.ran or not evidence.first.requires_grad or evidence.first.loss == 0.0:
        return None
    found = [g for p in evidence.passes for g in p.gradients.values() if g is not None]
    if not found or any(bool(g.any()) for g in found):
        return None
    return Seen(loss=evidence.first.loss, num_gradients=len(found))


@check(
    "samples-mixed",
    cause="samples-mixed",
    severity="critical",
    see="A sample's output depends on the inputs of {share:.0%} of the other samples in its batch.",
    sure=0.93,
    source='Karpathy 2019, "A recipe for training neural networks": use backprop to chart dependencies',
    remedy="Look for view() or reshape() that runs over the batch, a wrong dim, batch_first.",
)
def samples_mixed(evidence: Evidence) -> Seen | None:
    """In evaluation mode the first sample's output has a derivative by the inputs of other samples.

    That is exactly zero if samples are separate, so there is no threshold. Checked for pairs with one input tensor and
    one target per sample. Not checked if the model has or gets a matrix over the samples (graphs), or if targets are
    sequences, which may lie along the first dimension.
    """
    if evidence.bench.form != "pair" or not evidence.ran:
        return None
    tensors, targets = tensors_in(evidence.bench.parts(evidence.batches[0])[0]), evidence.targets
    if len(tensors) != 1 or not targets or tensors[0].dim() < 2 or tensors[0].shape[0] < 3:
        return None
    given, target, size = tensors[0], targets[0], tensors[0].shape[0]
    is_by_sample = 1 <= target.dim() <= 2 and target.shape[0] == size
    if target.dim() == 2:  # [time, samples], perhaps
        is_by_sample &= given.is_floating_point() and (given.dim() < 3 or target.shape[1] != given.shape[1])
    is_graph = any(t.dim() >= 2 and t.shape[-1] == t.shape[-2] == size for t in evidence.bench.model.buffers())
    # Norms without running statistics always use those of the batch.
    uses_batch = any(norm.running_mean is None for norm in _modules(evidence, _BATCH_NORMS).values())
    if not is_by_sample or is_graph or uses_batch or not evidence.flow.across_samples:
        return None
    return Seen(share=evidence.flow.across_samples, num_samples=size)


@check(
    "leaks-from-the-future",
    cause="trivial-targets",
    severity="critical",
    see="The targets are the next inputs, and the model sees them: its outputs depend on later positions.",
    sure=0.95,
    remedy="Give attention a causal mask, a convolution padding on the left, a recurrent layer one direction.",
)
def leaks_from_the_future(evidence: Evidence) -> Seen | None:
    """The targets are the next inputs of a sequence, and outputs have a derivative by later inputs, the answers."""
    if not evidence.ran or evidence.flow.is_causal is not False or not evidence.inputs or not evidence.targets:
        return None
    given, target = evidence.inputs[0], evidence.targets[0]
    if given.dim() < 2 or target.shape[:2] != given.shape[:2] or target.dtype != given.dtype or len(given[0]) < 4:
        return None
    valid = (target[:, :-1] >= 0) & (given[:, 1:] != given[:, :-1])
    share = float((given[:, 1:] == target[:, :-1])[valid].double().mean())  # NaN of none
    return Seen(share_of_next=share) if share > 0.95 else None


@check(
    "unusual-optimizer-settings",
    cause="wrong-optimizer-settings",
    like="odd-optimizer-settings",
    see="{optimizer} runs with unusual settings: {_odd}.",
    sure=0.88,
    source='Kingma and Ba 2015; Choi et al. 2019, "On empirical comparisons of optimizers"',
)
def unusual_optimizer_settings(evidence: Evidence, *, eps: float = 0.01, momentum: float = 0.995) -> Seen | None:
    """eps is at least `eps`, momentum or beta1 above `momentum`, or beta2 below 0.5 or almost 1."""
    kind = type(evidence.bench.optimizer).__name__
    odd = [text for group in evidence.groups for text in odd_settings({**group, "kind": kind}, eps, momentum)]
    return Seen(optimizer=kind, _odd=list(dict.fromkeys(odd))) if odd else None


@check(
    "heavy-weight-decay",
    cause="weight-decay-too-high",
    see="weight_decay is {weight_decay:g}{_how}.",
    sure=0.88,
    source="Loshchilov and Hutter 2019; usual are 1e-5 to 1e-2 as a part of the gradient, up to 0.3 for AdamW",
    remedy="Divide weight_decay by 10 or more, and leave biases and norms out of it.",
)
def heavy_weight_decay(evidence: Evidence, *, in_gradient: float = 0.05, per_step: float = 0.005) -> Seen | None:
    """Weight decay in the gradient is above `in_gradient`, or decoupled decay takes more than `per_step` each step."""
    kind = type(evidence.bench.optimizer).__name__
    for group in evidence.groups:
        decay, lr, initial_lr = (float(group.get(key) or 0.0) for key in ("weight_decay", "lr", "initial_lr"))
        is_decoupled = kind in _DECOUPLED or bool(group.get("decoupled_weight_decay"))
        shrinks = decay * max(lr, initial_lr)
        if shrinks > per_step if is_decoupled else decay > in_gradient:
            how = f": each step takes {shrinks:.2g} off every weight" if is_decoupled else ", as a part of the gradient"
            return Seen(weight_decay=decay, lr=lr, is_decoupled=is_decoupled, _how=how)
    return None


@check(
    "eval-mode-in-training",
    cause="eval-mode-in-training",
    see="The model is in evaluation mode: {layers} {_what}.",
    source="torch.nn.Module.train: dropout and batch statistics are off in evaluation mode",
    remedy="Call model.train() before training; keep single modules in evaluation mode by a train() of your own.",
)
def eval_mode_in_training(evidence: Evidence) -> Seen | None:
    """The whole model is in evaluation mode, and it has BatchNorm or Dropout modules, which that changes."""
    norms = _modules(evidence, _BATCH_NORMS)
    changed = {**norms, **_modules(evidence, _DROPOUTS)}
    if evidence.bench.model.training or not changed or any(m.training for m in changed.values()):
        return None
    what = "use running statistics that nothing updates" if norms else "drop nothing"
    return Seen(layers=changed, num_modules=len(changed), warn=bool(norms), _what=what)
