"""What a training step is made of: columns, scores with their graphs, gradients, reports, the optimizer.

May import: ``scoring``, ``model``.
"""
