"""Evidence that a policy is active: counters, a comparison of ranks, a trace and metrics."""
