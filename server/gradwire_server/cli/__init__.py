"""The command ``gradwire``: one file a command.

May import everything of the front, and nothing with torch.
"""
