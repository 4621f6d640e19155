"""A comparison of expert slices with whole experts, as in MoEShard: `python -m benchmark.expert_sharding`."""
