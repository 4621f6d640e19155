"""What selection costs, and what to choose when: `python -m benchmark.cost`."""
