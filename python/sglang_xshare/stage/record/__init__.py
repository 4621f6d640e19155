"""Evidence that a policy is on: what is counted, compared, traced and reported."""
