"""The agent: it lends an engine of this machine to a server on another one.

May import: ``engine_client``, ``engine_link``, ``config``, ``errors``. No torch.
"""
