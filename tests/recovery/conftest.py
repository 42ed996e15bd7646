"""Puts the helpers of the guard's tests on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "guard"))
