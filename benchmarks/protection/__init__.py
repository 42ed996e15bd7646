"""What brings a run through trouble: clip policies replayed on recorded norms, trainings that diverge, what it costs.

python -m benchmarks.protection            # about twenty minutes on two cores; prints the tables, writes the results
python -m benchmarks.protection --quick
python -m benchmarks.protection --help
"""
