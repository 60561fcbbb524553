"""The command ``gradwire``: one file per command.

May import every folder of the front, and nothing that needs torch.
"""
