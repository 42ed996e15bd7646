"""Puts this folder on the path, where the tests in device/ find `guard_helpers` too."""
