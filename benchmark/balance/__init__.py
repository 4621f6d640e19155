"""What expert-parallel ranks have to load under policies, XShare's Table 2: `python -m benchmark.balance`."""
