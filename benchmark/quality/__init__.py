"""What a policy costs in quality, exactly as decoding would pay it: `python -m benchmark.quality POLICIES...`."""
