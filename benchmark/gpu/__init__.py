"""The run on a GPU, in stages: each measures one thing, keeps every point it has, and says how it stands to its bar."""
