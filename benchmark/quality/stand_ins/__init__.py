"""Small stand-ins for experts that a policy drops, in bytes loaded: `python -m benchmark.quality.stand_ins`."""
