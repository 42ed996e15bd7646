"""What every experiment of this folder does at its end."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

import fastguard


def finish(figures: dict[str, Any], path: Path, *, dry: bool) -> int:
    """Prints the figures beside what they were taken on, and saves them unless `dry`.

    Returns:
        The exit code: 1 if `figures["num_wrong"]` is above zero.
    """
    figures = {
        **figures,
        "fastguard": fastguard.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if not dry:
        path.write_text(text + "\n", encoding="utf-8")
    return int(figures["num_wrong"] > 0)
