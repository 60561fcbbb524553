"""The engine as the front sees it: a child process that answers requests and is started again when it dies.

May import: ``engine_link``, ``config``, ``errors``. No torch.
"""
