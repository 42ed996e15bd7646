"""Real trainings with planted faults, and healthy ones: how often the rules are right, and how often they cry wolf.

python -m benchmarks.faults            # run what is not in the cache, print the table, write the results
python -m benchmarks.faults --help
"""
