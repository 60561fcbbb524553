"""Losses of gradwire: pure functions on torch tensors, and their registry.

Each file is one loss or one close family. To write one, read ``causal_lm.py``, then ``batch.py`` and
``outputs.py``, which are all that a loss sees.
"""
