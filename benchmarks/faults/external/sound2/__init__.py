"""Sound trainings as scripts: some ninety more set-ups, each known by its quality, to count false alarms on.

Half of the kinds are set aside: what the rules say there is counted, and nothing is mended for it.
"""
