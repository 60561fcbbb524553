"""The protocols through which callers reach the core: one folder per protocol.

A door translates between its protocol and the core, and does nothing else.

May import: ``core`` and what is below it, and its protocol's library. Doors do not import each other.
"""
