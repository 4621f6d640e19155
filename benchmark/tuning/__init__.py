"""A comparison of the plans that `sglang-xshare tune` finds with the published settings of policies."""
