"""Static pruning (MoE-Spec, section 3.2): a checkpoint with only the best experts of a fixed order in every layer."""
