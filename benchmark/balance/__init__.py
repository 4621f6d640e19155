"""Measurements of active experts on expert-parallel ranks, as in XShare's Table 2: `python -m benchmark.balance`."""
