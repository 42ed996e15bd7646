"""How a run is doing, in words for a person and in plain types for a machine. Needs no torch."""

from .report import Report as Report
from .report import Status as Status
from .report import build_report as build_report
