"""The code that runs once, before or while the model loads: it reads flags, refuses servers, and finds the layers."""
