"""What `sglang-xshare tune` finds, against the published settings."""
