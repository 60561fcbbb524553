"""The protocols by which callers reach the core: one folder each.

A door translates in both directions and does nothing else.

May import: ``core`` and what is below it, and its protocol's library. Doors do not import each other.
"""
