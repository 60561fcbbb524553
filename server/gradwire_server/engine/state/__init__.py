"""The engine's state: runs, checkpoints, exports, reference models.

May import: ``training``, ``scoring``, ``model``.
"""
