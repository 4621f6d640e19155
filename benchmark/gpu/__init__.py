"""The run on a GPU, in experiments: each measures one thing, records every point, and compares it with its bar."""
