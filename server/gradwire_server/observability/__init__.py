"""Metrics, traces and logs of front and engine, and the view that ``gradwire status`` draws.

May import: ``engine_link``.
"""
