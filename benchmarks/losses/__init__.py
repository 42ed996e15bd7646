"""Wrong and sound losses, and what `fastguard.preflight` says of them: `python -m benchmarks.losses`."""
