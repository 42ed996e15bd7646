"""Faults written anew a second time, faults only, as people make them; each has a sound twin that it is worse than.

What counts as right was written down before any rule was asked, and rules were asked once before anything was mended.
"""
