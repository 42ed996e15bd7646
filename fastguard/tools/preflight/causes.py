"""From what the checks found to root causes: which one thing explains several findings."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...diagnosis import CAUSES, Finding
from ...diagnosis.finding import SEVERITIES
from .registry import CHECKS

_FIT = frozenset(("trial-steps-overshoot", "nothing-is-learnt", "optimizer-cannot-fit", "trial-steps-too-short"))
_STUCK = frozenset(("nothing-is-learnt", "optimizer-cannot-fit", "all-gradients-zero"))


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a cause is, and which checks' findings follow from it and are not told as causes of their own."""

    summary: str
    explains: frozenset[str] = field(default_factory=frozenset)


EXPLANATIONS = {
    "bad-batch": Explanation("The data holds what no model can digest.", _FIT | {"undefined-operation"}),
    "wrong-output-layer": Explanation(
        "The last layer, its activation or its width does not suit the loss and the targets.",
        _FIT
        | _STUCK
        | {"loss-far-above-chance", "trial-pass-fails", "samples-mixed", "undefined-operation"}
        | {"gradient-vanishes-at-start", "targets-of-another-kind", "softmax-into-bce"},
    ),
    "wrong-loss": Explanation(
        "The loss is not the one that this task needs: its kind, its sign, its reduction or the shapes it is given.",
        _FIT
        | _STUCK
        | {"loss-far-above-chance", "trial-pass-fails", "targets-out-of-reach", "activation-before-cross-entropy"}
        | {"targets-out-of-scale", "gradient-explodes-at-start"},
    ),
    "samples-mixed": Explanation("A sample's output depends on the other samples of its batch.", _STUCK),
    "parameters-cut-off": Explanation(
        "The loss does not depend on parameters that are to be trained.", _STUCK | {"trial-pass-fails"}
    ),
    "parameters-missing-from-optimizer": Explanation(
        "The optimizer does not have the parameters that are to be trained.",
        _STUCK | {"gradient-does-not-arrive"} | _FIT,
    ),
    "frozen-parameters": Explanation("Parameters are frozen, and it does not look as if on purpose.", _STUCK | _FIT),
    "singular-operation": Explanation(
        "A function is evaluated where it, or its derivative, is not finite.", frozenset(("overflow-at-start",)) | _FIT
    ),
    "half-precision-overflow": Explanation(
        "Values leave the range of half precision.", frozenset(("gradient-explodes-at-start",)) | _FIT
    ),
    "trivial-targets": Explanation(
        "The targets need no model: they are constant, or among the inputs.",
        frozenset(("rare-classes", "classes-as-quantities", "targets-out-of-scale")) | _STUCK,
    ),
    "repeated-data": Explanation(
        "The same samples come again and again.", _STUCK | {"duplicated-samples", "dead-units-at-start"}
    ),
    "unshuffled-data": Explanation("The data comes sorted: a batch shows only a part of the task.", frozenset()),
    "imbalanced-targets": Explanation("One class has nearly all samples.", _STUCK),
    "batch-size": Explanation(
        "Batches are so small that each step follows a single sample.",
        frozenset(("normalised-over-too-few", "trial-steps-overshoot")),
    ),
    "unnormalised-inputs": Explanation(
        "The inputs are not scaled: large ones swamp the others, and the weights' initial scale does not suit them.",
        _FIT
        | {"loss-far-above-chance", "saturated-units-at-start", "dead-units-at-start", "gradient-explodes-at-start"}
        | {"gradient-vanishes-at-start", "all-gradients-zero", "signal-dies-out"},
    ),
    "unnormalised-targets": Explanation(
        "The targets are not scaled: the first steps, large ones, only learn their mean and size.",
        _FIT | {"gradient-explodes-at-start"},
    ),
    "poor-initialisation": Explanation(
        "Weights begin with a scale, or a symmetry, from which learning is hard.",
        _FIT
        | {"gradient-vanishes-at-start", "gradient-explodes-at-start", "dead-units-at-start", "all-gradients-zero"}
        | {"saturated-units-at-start"},
    ),
    "dead-units": Explanation(
        "Units that answer nothing to any input cut off the layers before them.",
        _FIT | {"signal-dies-out", "gradient-vanishes-at-start", "all-gradients-zero"},
    ),
    "exploding-gradients": Explanation(
        "Values or gradients grow from layer to layer.", _FIT | {"loss-far-above-chance", "undefined-operation"}
    ),
    "vanishing-gradients": Explanation("Hardly any gradient reaches the first layers.", _FIT),
    "normalisation-statistics": Explanation(
        "Normalisation layers use statistics that are not those of the data.", _STUCK
    ),
    "dropout-too-high": Explanation("Dropout leaves hardly anything to learn from.", _STUCK | _FIT),
    "weight-decay-too-high": Explanation(
        "Weight decay takes more from the weights than learning gives them.", _STUCK | _FIT
    ),
    "wrong-optimizer-settings": Explanation(
        "A setting of the optimizer (eps, betas, momentum) is out of the ordinary, and learning suffers.",
        frozenset(("trial-steps-too-short", "trial-steps-overshoot", "nothing-is-learnt")),
    ),
    "learning-rate-too-high": Explanation("The learning rate is too high: steps overshoot.", _STUCK),
    "learning-rate-too-low": Explanation(
        "The learning rate is too low: the weights hardly move.", _STUCK | {"trial-steps-too-short"}
    ),
    "model-cannot-fit": Explanation("The model cannot learn even a few batches by heart.", frozenset()),
    "shape-mismatch": Explanation("Shapes do not fit together in the first step.", frozenset(("nothing-is-learnt",))),
    "error-in-first-step": Explanation("The first step raises an error.", frozenset(("nothing-is-learnt",))),
}
_ORDER = tuple(EXPLANATIONS)  # what comes earlier explains what comes later, where both could
_WEAK = frozenset(("optimizer-cannot-fit",))  # says that something is wrong with how it is trained, and hardly what


def find(findings: Iterable[Finding]) -> list[Finding]:
    """The root causes, the most severe and surest first, each with the findings it explains as `symptoms`.

    A finding that follows from an earlier cause of the list speaks for no cause of its own; unless it is critical and
    what would explain it is not.
    """
    left = {f.rule: f for f in findings if f.severity != "info"}
    causes = []
    for takes_weak, name in itertools.product((False, True), _ORDER):
        reasons = [f for f in left.values() if f.evidence.get("cause", CHECKS[f.rule].cause) == name]
        if not reasons or (all(f.rule in _WEAK for f in reasons) and not takes_weak):
            continue
        against = 1.0
        for finding in reasons:
            against *= 1.0 - finding.confidence
        severity = max((f.severity for f in reasons), key=SEVERITIES.index)
        followed = [
            f
            for f in left.values()
            if f.rule in EXPLANATIONS[name].explains
            and f not in reasons
            and (f.severity != "critical" or severity == "critical" or f.rule in _FIT)
        ]
        for finding in (*reasons, *followed):
            left.pop(finding.rule)
        reasons.sort(key=lambda f: f.weight, reverse=True)
        causes.append(
            Finding(
                EXPLANATIONS[name].summary,
                severity=severity,
                layers=next((f.layers for f in reasons if f.layers), ()),
                evidence={"speaks_for_it": [f.rule for f in reasons]},
                confidence=1.0 - against,
                recommendation=reasons[0].recommendation,
                rule=name,
                link=f"docs/rules/causes.md#{name}" if name in CAUSES else reasons[0].link,
                symptoms=(*reasons, *followed),
            )
        )
    return sorted(causes, key=lambda one: one.weight, reverse=True)
