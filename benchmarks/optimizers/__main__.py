"""`python -m benchmarks.optimizers`."""

from .suite import main

raise SystemExit(main())
