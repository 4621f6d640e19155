"""`sglang-xshare check`: how a server with these flags would start, whether it fits, what policies would gain: told
without starting it.
"""
