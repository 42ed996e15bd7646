"""Trainings as others write them, made without a look at a rule: one or two sound ways each, and faults in most."""
