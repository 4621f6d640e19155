"""Selection in vectorized torch on any device. This backend runs the plans that no compiled backend supports."""
