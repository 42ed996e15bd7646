"""Set-ups with a fault in them that is there before the first step: a sound one of `tasks`, changed.

Sets A (AUTOTRAINER's kinds of model), B (DeepFD's seeding: lr, loss, opt, act) and C (the mutation operators of
DeepCrime and DEFault) follow their publications as far as a fault exists before training: the number of epochs does
not, nor does the patience of an early stop. Set D is our own: what else an expert looks for.
"""

from __future__ import annotations

from . import set_a, set_b, set_c, set_d, set_d_model
from .planted import FAULTS

__all__ = ["FAULTS", "set_a", "set_b", "set_c", "set_d", "set_d_model"]
