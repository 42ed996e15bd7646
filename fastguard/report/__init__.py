"""The report on a run: as text, and as plain data. Needs no torch."""

from .report import Report as Report
from .report import Status as Status
from .report import build_report as build_report
