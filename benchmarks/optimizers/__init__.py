"""Other people's optimizers under guard: training must not change, a skipped step must not have been, clipping must be
torch's. `python -m benchmarks.optimizers` makes the table."""
