"""The use cases of the server as functions on plain types, whatever door they come through.

May import: ``scheduling`` and what is below it. Never ``doors``, and never a protocol's library.
"""
