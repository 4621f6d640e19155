"""The verb `tune`: the setting with the fewest active experts within a tolerated loss, found on the running server."""
