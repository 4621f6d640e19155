"""The run on a GPU, in experiments: each measures one thing, keeps every point, and says how it stands to its bar."""
