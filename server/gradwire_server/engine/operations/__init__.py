"""Execution of operations on a run: one handler per kind, and the lifecycle that all kinds share.

May import: ``sampling``, ``state`` and what is below them.
"""
