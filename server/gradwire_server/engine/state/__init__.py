"""What the engine keeps: runs, checkpoints, exports, reference models.

May import: ``training``, ``scoring``, ``model``.
"""
