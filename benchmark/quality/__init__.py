"""Measurements of the quality that a policy loses in decode steps: `python -m benchmark.quality POLICIES...`."""
