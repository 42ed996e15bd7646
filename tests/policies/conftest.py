"""The helpers of the guard's tests serve here too."""

from __future__ import annotations

import sys
from pathlib import Path

_GUARD = Path(__file__).parents[1] / "guard"
sys.path[:0] = [folder for folder in (str(_GUARD), str(_GUARD / "device")) if folder not in sys.path]
