"""The plans of `sglang-xshare tune`, against the published settings."""
