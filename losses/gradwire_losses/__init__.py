"""Losses of gradwire: pure functions on torch tensors, and their registry.

Each file is one loss or one family of similar losses. To write a loss, read ``causal_lm.py``, then ``batch.py`` and
``outputs.py``, which define its input and output.
"""
