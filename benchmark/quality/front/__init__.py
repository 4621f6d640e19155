"""Measurements of the gain from `own_share` and squared utilities: `python -m benchmark.quality.front`."""
