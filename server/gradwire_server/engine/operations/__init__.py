"""Decisions on what to execute next, and its execution: one handler per kind, and the lifecycle that all kinds share.

May import: ``sampling``, ``state`` and what is below them.
"""
