"""From numbers to a named problem and a remedy: rules that read a `TrainingHistory`. Needs no torch."""

from __future__ import annotations

# Each of these registers its rules or causes.
from . import known_causes as _causes
from . import rules as _rules
from .causes import CAUSES as CAUSES
from .causes import UNKNOWN as UNKNOWN
from .causes import Cause as Cause
from .causes import cause as cause
from .causes import find_causes as find_causes
from .causes import unexplained as unexplained
from .finding import Finding as Finding
from .finding import Seen as Seen
from .finding import Severity as Severity
from .finding import by_sign as by_sign
from .registry import RULES as RULES
from .registry import Rule as Rule
from .registry import diagnose as diagnose
from .registry import make_rule as make_rule
from .registry import rule as rule

__all__ = ["CAUSES", "RULES", "UNKNOWN", "Cause", "Finding", "Rule", "Seen", "Severity", "by_sign", "cause",
           "diagnose", "find_causes", "make_rule", "rule", "unexplained"]  # fmt: skip
del _causes, _rules
