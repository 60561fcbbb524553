"""From a model's name to its weights: configuration, the pool of shared copies, quantization, offloading, checks."""
