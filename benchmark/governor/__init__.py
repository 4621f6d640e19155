"""What a governor saves on changing traffic: `python -m benchmark.governor`."""
