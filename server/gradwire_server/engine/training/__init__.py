"""Training on scores: loss calls, gradients, accumulation, the optimizer.

May import: ``scoring``, ``model``.
"""
