"""The experts that `own_share` and squared utilities save at equal loss: `python -m benchmark.quality.front`."""
