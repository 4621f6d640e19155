"""The loss of quality under a policy, exactly as in decoding: `python -m benchmark.quality POLICIES...`."""
