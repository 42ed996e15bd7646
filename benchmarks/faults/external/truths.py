"""What a right answer says of each kind of fault: the symptom families and the causes, any of which is right."""

from __future__ import annotations

from .case import Truth

_STEPS = ("lr", "explosion", "loss", "weights", "units", "nonfinite")
_STILL = ("loss", "data", "output", "setup", "vanishing")


def either(*truths: Truth) -> Truth:
    """Any of them is right."""
    return Truth(
        tuple(dict.fromkeys(family for truth in truths for family in truth.families)),
        tuple(dict.fromkeys(cause for truth in truths for cause in truth.causes)),
    )


HIGH = Truth(_STEPS, ("learning-rate-too-high",))
LOW = Truth(("lr", "loss", "weights"), ("learning-rate-too-low",))
KEPT = Truth(("setup", *_STEPS), ("missing-zero-grad",))
LABELS = Truth(("data", "loss", "setup"), ("wrong-targets",))
BATCH = Truth(("nonfinite", "data"), ("bad-batch",))
OUTPUT = Truth((*_STILL, "units"), ("wrong-output-layer",))
LOSS = Truth((*_STILL, "explosion"), ("wrong-loss",))
INPUTS = Truth(("data", "setup", "output", "vanishing", *_STEPS), ("unnormalised-inputs",))
TARGETS = Truth(("data", "setup", "output", *_STEPS), ("unnormalised-targets",))
CLIPPED = Truth(("explosion", "lr", "loss", "weights"), ("clipped-away", "gradients-too-large-to-clip"))
CUT = Truth(
    ("setup", "weights", "vanishing", "loss"), ("parameters-cut-off", "no-gradient-arrives", "frozen-parameters")
)
LEFT_OUT = Truth(("setup", "weights", "loss"), ("parameters-missing-from-optimizer", "frozen-parameters"))
LEAK = Truth(("data", "loss", "vanishing"), ("trivial-targets",))
CANNOT = Truth(("loss", "setup", "output"), ("model-cannot-fit",))
SORTED = Truth(("data", "loss", "explosion"), ("unshuffled-data",))
SINGULAR = Truth(("nonfinite", "loss"), ("singular-operation",))
EXPLODING = Truth((*_STEPS, "setup"), ("exploding-gradients", "poor-initialisation", "saturated-units"))
COLLAPSED = Truth((*_STILL, "units"), ("collapsed-representation", "trivial-targets", "wrong-loss"))
DECAY = Truth(("weights", "loss", "vanishing", "units", "setup"), ("weight-decay-too-high",))
DROPPED = Truth(("units", "loss", "setup"), ("dropout-too-high",))
SETTINGS = Truth(("lr", "loss", "weights", "setup", "explosion"), ("wrong-optimizer-settings",))
SCHEDULE = Truth(("lr", "loss", "setup", "weights"), ("wrong-schedule", "learning-rate-too-low"))
NOT_STEPPED = Truth(SCHEDULE.families, ("scheduler-not-stepped", *SCHEDULE.causes))
GROWING = Truth((*SCHEDULE.families, *_STEPS), ("wrong-schedule", "learning-rate-too-high"))
OVERWRITTEN = Truth(("setup", "weights", "loss"), ("weights-overwritten",))
DEAD = Truth(("units", "vanishing", "weights", "setup", "loss"), ("dead-units", "poor-initialisation"))
SATURATED = Truth(("units", "vanishing", "weights", "setup", "loss"), ("saturated-units", "poor-initialisation"))
REPEATED = Truth(("data", "loss"), ("repeated-data", "overfitting"))
SHORT = Truth(("loss", "lr"), ("stopped-too-early", "learning-rate-too-low"))
NO_GRADIENT = Truth(
    ("setup", "weights", "vanishing", "loss"),
    ("no-gradient-arrives", "parameters-cut-off", "parameters-missing-from-optimizer"),
)
OUTLIERS = Truth(
    ("data", "setup", "output", "vanishing", "nonfinite", *_STEPS), ("outliers", "unnormalised-inputs", "bad-batch")
)
UNEVEN = Truth(("data", "loss", "output"), ("imbalanced-targets", "trivial-targets", "collapsed-representation"))
DIFFERS = Truth(("data", "loss"), ("preprocessing-differs",))
VANISHING = Truth(
    ("vanishing", "weights", "units", "loss", "setup"),
    ("vanishing-gradients", "saturated-units", "poor-initialisation"),
)
POOR = Truth((*VANISHING.families, "explosion"), ("poor-initialisation", "dead-units", "vanishing-gradients"))
SUMMED = Truth(("setup", "explosion", "lr", "loss"), ("wrong-loss", "learning-rate-too-high", "unscaled-accumulation"))
SMALL_BATCH = Truth(("data", "explosion", "loss", "lr"), ("learning-rate-too-high",))
OVERFITTED = Truth(("loss", "data"), ("overfitting",))
FROZEN = Truth(("setup", "weights", "vanishing", "loss"), ("frozen-parameters", "parameters-cut-off"))

BLIND = either(CANNOT, LABELS, LEAK)  # what decides the targets never reaches the model
CUT_SHORT = either(SHORT, LOW)
DEEP = either(VANISHING, POOR, DEAD)
FEW = either(OVERFITTED, REPEATED)
FIXED = either(CUT, FROZEN, LEFT_OUT)  # parameters that never change
FOREIGN_HIGH = either(SETTINGS, HIGH)
FOREIGN_LOW = either(SETTINGS, LOW)
LARGE = either(POOR, SATURATED, EXPLODING)
MASKLESS = either(LEAK, DIFFERS, OVERFITTED)
NAN_INSIDE = either(SINGULAR, EXPLODING)
NOISE = either(LABELS, OVERFITTED)
OUTPUT_OR_LOSS = either(OUTPUT, LOSS)
SPOILT_ROWS = either(BATCH, SINGULAR)  # NaN that came with the data
TINY = either(VANISHING, POOR, LOW)
UNSCALED = either(INPUTS, HIGH, SATURATED)
