"""Who may call, and how much of the server each key may hold: API keys and quotas.

May import: ``config``, ``errors``.
"""
