"""A third set that nobody tuned on: scripts that train something, sound or with one fault of those that people make.

What counts as right was written down before any rule was asked, and rules were asked once before anything was mended.
"""
