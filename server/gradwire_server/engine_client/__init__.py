"""The front's client of the engine: a child process that answers requests and is restarted when it dies.

May import: ``engine_link``, ``config``, ``errors``. No torch.
"""
