"""`sglang-xshare check`: how a server with these flags would start, told without starting it."""
