"""Checks and preparations when a server starts: its flags, its backends, the model and the model's MoE layers."""
