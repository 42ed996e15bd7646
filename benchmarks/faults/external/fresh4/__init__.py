"""Ordinary trainings, several sound ways and several faults of each, and runs whose data or aims change on the way."""
