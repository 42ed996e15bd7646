"""`python -m benchmarks.faults.preflight`."""

from . import main

raise SystemExit(main())
