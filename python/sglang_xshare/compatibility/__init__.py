"""Checks that run when a server starts. They cover its flags, backends, model and MoE layers."""
