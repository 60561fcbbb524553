"""The use cases of the server as methods on plain types, independent of the protocol that calls them.

May import: ``scheduling`` and what is below it. Never ``doors``, and never a protocol's library.
"""
