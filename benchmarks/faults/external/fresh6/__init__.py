"""Ordinary trainings with the faults of every day, and sound ones that look like faults by their nature."""
