"""Trainings written anew, as somebody outside writes them: loops by hand, no validation, and what goes wrong in them.

What counts as right was written down before any rule was asked, and rules were asked once before anything was mended.
"""
