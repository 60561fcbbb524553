"""The parts of a training step: columns, scores with their graphs, gradients, reports, the optimizer.

May import: ``scoring``, ``model``.
"""
