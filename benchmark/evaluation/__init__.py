"""Standard benchmarks with the expert policy off and on: `python -m benchmark.evaluation TASK...`."""
