"""A run of all CPU benchmarks, which also writes tables and pictures into the pages: `python -m benchmark.records`."""
