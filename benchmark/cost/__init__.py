"""Measurements of the time that selection takes: `python -m benchmark.cost`."""
