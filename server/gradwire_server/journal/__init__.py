"""Durable storage: operations and results, written before they are acknowledged; the rows of runs and checkpoints.

May import: ``access``, ``errors``, ``crash_points``.
"""
