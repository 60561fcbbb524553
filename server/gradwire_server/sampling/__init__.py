"""Generation: an interface, and the sampler that shares the engine's weights."""
