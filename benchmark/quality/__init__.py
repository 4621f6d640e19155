"""Measurements of the quality that a policy costs during decoding: `python -m benchmark.quality POLICIES...`."""
