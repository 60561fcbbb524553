"""API keys, their quotas and turns: who may call the server, how much of it each key may hold, and when.

May import: ``config``, ``errors``.
"""
