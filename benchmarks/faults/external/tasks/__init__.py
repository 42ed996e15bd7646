"""Base tasks of many kinds, each with sound ways and a table of faults."""
