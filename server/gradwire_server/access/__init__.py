"""API keys and quotas: who may call the server, and how much of it each key may hold.

May import: ``config``, ``errors``.
"""
