"""The subcommand `tune`: on a running server, the setting with the fewest active experts within a tolerated loss."""
