"""`python -m fastguard` is the `fastguard` command."""

from __future__ import annotations

import sys

from .commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
