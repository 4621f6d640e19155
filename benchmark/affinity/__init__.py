"""Measurements of expert-affinity dispatch, both simulated and on a server with replicas."""
