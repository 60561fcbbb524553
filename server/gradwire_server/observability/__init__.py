"""Metrics, traces and logs of the front and the engine.

May import: ``engine_link``.
"""
