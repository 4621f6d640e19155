"""The command `sglang-xshare check`. It reports whether a server would start and fit a GPU, and what policies gain."""
