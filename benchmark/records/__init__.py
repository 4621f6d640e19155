"""A run of all CPU benchmarks that also writes the tables and pictures of the pages: `python -m benchmark.records`."""
