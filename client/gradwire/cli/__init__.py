"""The command ``gradwire``: one file per command that works with the client alone.

Commands of other packages come in through the entry-point group ``gradwire.commands``.
"""
