"""Rules on initialisation and weight decay."""

from __future__ import annotations

import re

from ...records import TrainingHistory
from ..finding import Seen
from ..needs import penalty
from ..registry import rule
from ..signals import as_in_gpt2, has_had_time, is_stuck, signals_of, training_batches
from .output import last_layer

TITLE = "Weights and updates"

_OF_TORCH = re.compile(r"Linear|Conv\d|LSTM|GRU|RNN|Attention")
_COUPLED = frozenset(["SGD", "ASGD", "Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop"])


@rule(
    "large-weight-decay",
    source="the usual 1e-4 to 1e-2 of SGD and Adam, 1e-2 to 0.3 of AdamW, and a decade beyond",
    see="The {_what}.",
    remedy="Divide weight_decay by 100 or more, and leave biases and norms out of it.",
    needs_descent=True,
    needs_harm=True,
)
def large_weight_decay(history: TrainingHistory, *, coupled: float = 0.05, decoupled: float = 1.0) -> Seen | None:
    """Weight decay is `coupled` or more through the gradient, or `decoupled` or more in AdamW.

    Info; a warning from ten times `coupled` on, or if 100 losses, or forty at the end, gained less than a share 0.4 of
    the first (0.6 from twice `coupled` on). Also a warning if a term of the loss takes |w| or w², is nearly all of the
    gradient, and all inputs of a batch come to have one output.
    """
    largest, least, is_far = 0.0, 0.4, False
    for settings in history.model.optimizer_settings:
        value = settings.get("weight_decay")
        limit = coupled if settings.get("kind") in _COUPLED else decoupled
        if isinstance(value, (int, float)) and value >= limit:
            largest = max(largest, float(value))
            if limit == coupled:
                least = 0.6 if value >= 2.0 * coupled else 0.1
                is_far = is_far or value >= 10.0 * coupled
    flat = [x.output_spread <= 1e-4 * max(x.output_abs_max, 1e-12) for x in training_batches(history)]
    term = "" if largest or flat[-2:] != [True, True] or flat[0] else penalty(history)
    if not (largest or term) or not history.num_clean:
        return None
    is_bad = bool(term) or is_far or not signals_of(history).progress >= least
    what = f"penalty of {term} in the loss left one output for all inputs" if term else f"weight decay is {largest:g}"
    return Seen(
        warn=history.losses.count >= 40 and has_had_time(history, 100) and is_bad,
        weight_decay=largest,
        term=term,
        _what=what,
        is_certain=True if term or is_far else None,
    )


@rule(
    "poor-initialisation",
    source="the toolkit's check_initialization (0.1 and 10 times sqrt(2 / fan_in), He et al. 2015)",
    see="{num_layers:layer} began with weights that are too {_what}: {_worst} with {ratio:.2g} times the standard "
    "deviation that its fan-in asks for.",
    remedy="Initialise these layers by their fan-in: kaiming_normal_ for ReLU, xavier_normal_ for tanh.",
)
def poor_initialisation(history: TrainingHistory, *, small: float = 0.05, large: float = 8.0) -> Seen | None:
    """Weights began above `large` times the expected spread, or below `small` times it in a share 0.5 of the layers.

    A single layer is too small below 0.02, unless it is the last. Weights that are too small are info unless 50 losses
    (200 of a single layer) gained less than 0.3 of the first, or a share 0.5 of them is below 0.02. Twice the spread is
    too large in a share 0.5 of the layers. Recurrent weights (weight_hh) are too large above 1.1; up to twice the
    spread is info in gated units unless 200 losses gained less than 0.3. Equal weights in a share 0.5 of the layers are
    critical if less than 0.8 of the first loss was gained. GPT-2's spreads are not too small. Silent without a layer of
    torch's: then the fan-in is unknown.
    """
    known, kinds = history.model.initialization, history.model.module_kinds
    if not history.num_steps or (kinds and not any(_OF_TORCH.search(kind) for kind in kinds)):
        return None
    begin = history.overview.buckets[0].first_step
    flat = [name for name, (actual, _) in known.items() if actual == 0.0]
    if len(flat) > 0.5 * len(known) and not signals_of(history).progress >= 0.8:
        see = "{num_layers:layer} began with all weights equal: its units stay alike. {layers}."
        at = (begin, begin)
        return Seen(at=at, layers=flat, severity="critical", sure=0.95, see=see, num_layers=len(flat), ratio=0.0)
    ratios = {n: actual / expected for n, (actual, expected) in known.items() if actual > 0.0}
    all_large = sum(r > 2.0 for r in ratios.values()) >= 0.5 * max(len(ratios), 1)
    limits = {n: 1.1 if "weight_hh" in n else 2.0 if all_large else large for n in ratios}
    too_large = sorted((n for n, r in ratios.items() if r > limits[n]), key=lambda n: -ratios[n])
    usual = as_in_gpt2({n: actual for n, (actual, _) in known.items()}, history.model.module_kinds)
    too_small = sorted((n for n, r in ratios.items() if r < small and n not in usual), key=ratios.__getitem__)
    if len(too_small) < 0.5 * len(ratios):
        too_small = [n for n in too_small if ratios[n] < 0.02 and n not in last_layer(history)]
    names = too_large or too_small
    if not names:
        return None
    patience = 50 if len(too_small) >= 0.5 * len(ratios) and not too_large else 200
    is_large = bool(too_large) and (ratios[names[0]] > 2.0 or any(kind.startswith("RNN") for kind in kinds))
    is_tiny = sum(ratios[name] < 0.02 for name in too_small) >= 0.5 * len(ratios)
    return Seen(
        at=(begin, begin),
        layers=names,
        warn=is_large or is_tiny or not history.losses.count or is_stuck(history, 0.3, patience),
        ratio=ratios[names[0]],
        num_layers=len(names),
        share=len(names) / len(ratios),
        _what="large" if too_large else "small",
        _worst=names[0],
    )


@rule(
    "shrinking-weights",
    of="large-weight-decay",
    see="{_what}.",
    remedy="Divide weight decay by 10 or more, and leave biases and norms out of it.",
)
def shrinking_weights(history: TrainingHistory, *, decay: float = 0.01, shrunk: float = 0.3) -> Seen | None:
    """Decay takes more than a share `decay` of the weights each step, or the median weight's norm fell below `shrunk`
    of its first.

    The latter counts while the loss has not come down by a share 0.5.
    """
    taken, learns = history.model.decay_per_step or 0.0, signals_of(history).progress >= 0.5
    left = history.model.weight_growth if history.model.weight_growth is not None else 1.0
    said = [f"weight decay takes {taken:.1%} of the weights at each step"] if taken > decay else []
    said += [f"the median weight has shrunk to {left:.2g} of its first norm"] if left < shrunk and not learns else []
    text = " and ".join(said)
    if not history.num_clean or not text:
        return None
    return Seen(sure=0.95 if taken > decay else 0.8, _what=text[0].upper() + text[1:])
