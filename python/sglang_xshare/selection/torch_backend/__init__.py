"""Selection in vectorized torch: on any device, for plans that no compiled backend supports."""
