"""The subcommand `tune`, which finds the setting with the fewest active experts within a tolerated loss."""
