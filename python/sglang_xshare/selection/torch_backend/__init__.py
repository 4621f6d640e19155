"""Selection in vectorized torch: on any device, what the compiled backends do not take."""
