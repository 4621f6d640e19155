"""Measurements of selection with paged experts: `python -m benchmark.paged`, or `benchmark.paged.live` on a server."""
