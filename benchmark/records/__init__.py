"""All that a CPU can measure, from one commit, and the pages' tables of it: `python -m benchmark.records`."""
