"""The cost of selection, and the choice between its variants: `python -m benchmark.cost`."""
