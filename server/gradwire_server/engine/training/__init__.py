"""From scores to a step: loss calls, gradients, accumulation, the optimizer.

May import: ``scoring``, ``model``.
"""
