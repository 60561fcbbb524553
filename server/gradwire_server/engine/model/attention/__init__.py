"""Attention over packed sequences: the implementation that transformers calls, and its kernels by device and layout."""
