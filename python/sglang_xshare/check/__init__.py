"""The command `sglang-xshare check`: whether a server would start, whether it fits the GPU, and what policies gain."""
