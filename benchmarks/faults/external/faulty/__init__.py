"""Faulty runs: a module a set."""
