"""Expert-affinity dispatch: simulated on a model's own routing, and measured on a server with replicas."""
