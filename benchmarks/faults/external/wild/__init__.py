"""Sound trainings of many more kinds, and standard faults in some of them: material to tune on, apart from both halves.

Half of the kinds are set aside: what the rules say there is counted, and nothing is mended for it.
"""
