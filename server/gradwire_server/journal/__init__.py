"""What was asked and what was answered, on disk before anyone is told; and the rows of runs and checkpoints.

May import: ``access``, ``errors``, ``crash_points``.
"""
