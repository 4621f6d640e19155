"""What paged experts cost and selection saves of it: `python -m benchmark.paged`, served: `benchmark.paged.live`."""
