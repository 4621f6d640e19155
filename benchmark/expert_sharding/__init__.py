"""Experts in slices against experts whole, MoEShard's study: `python -m benchmark.expert_sharding`."""
