"""`sglang-xshare check`: whether a server with these flags is served, whether it fits, and what policies would gain."""
