"""`sglang-xshare check`: would a server with these flags be served, does it fit, what would policies gain."""
