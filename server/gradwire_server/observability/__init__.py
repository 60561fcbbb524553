"""Metrics, traces and logs of front and engine.

May import: ``engine_link``.
"""
