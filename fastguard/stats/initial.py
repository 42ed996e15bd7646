"""How widely weights are spread at the start in models that take no notice of fan-in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

_STD = 0.02
_NEAR = 0.1


def as_in_gpt2(stds: Mapping[str, float], module_kinds: Iterable[str]) -> set[str]:
    """Of weights by name, with their standard deviations: those that are as GPT-2 draws them, whatever their fan-in.

    All from a normal distribution of 0.02, the ends of residual branches divided by the root of their number; a model
    counts where a third of its matrices has the former, and normalisation brings signals back to size.

    Source: Radford et al. 2019, section 2.3; BERT and transformers' `initializer_range` without the division.
    """
    usual = sum(abs(std - _STD) <= _NEAR * _STD for std in stds.values())
    if 3 * usual < len(stds) or not any("norm" in kind.lower() for kind in module_kinds):
        return set()
    least = (1.0 - _NEAR) * _STD / math.sqrt(max(len(stds), 1))
    return {name for name, std in stds.items() if least <= std <= (1.0 + _NEAR) * _STD}
