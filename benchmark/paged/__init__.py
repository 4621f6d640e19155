"""The cost of paged experts, and what selection saves: `python -m benchmark.paged`, served: `benchmark.paged.live`."""
