"""From numbers to a named problem and a remedy: rules that read a `TrainingHistory`. Needs no torch."""

from __future__ import annotations

from . import rules as _rules  # registers the rules that come with fastguard
from .finding import Finding as Finding
from .finding import Severity as Severity
from .registry import RULES as RULES
from .registry import Rule as Rule
from .registry import diagnose as diagnose
from .registry import rule as rule

__all__ = ["Finding", "Severity", "Rule", "RULES", "rule", "diagnose"]
del _rules
