"""What runs once, before or while the model loads: reads flags, refuses what cannot be served, finds the layers."""
