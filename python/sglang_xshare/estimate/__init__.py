"""`sglang-xshare estimate`: what a policy would gain on a GPU, computed from bytes and bandwidth and never measured."""
