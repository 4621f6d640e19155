"""Active experts on expert-parallel ranks under policies, XShare's Table 2: `python -m benchmark.balance`."""
