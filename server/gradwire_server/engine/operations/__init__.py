"""What each kind of operation does to a run: one handler a kind, and the lifecycle that all of them share.

May import: ``sampling``, ``state`` and what is below them.
"""
