"""All measurements of a CPU, from one commit, and the pages' tables and pictures: `python -m benchmark.records`."""
