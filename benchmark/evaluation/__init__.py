"""Standard benchmarks with and without an expert policy: `python -m benchmark.evaluation TASK...`."""
