"""The commands that need the server: ``gradwire serve`` and ``gradwire keys``, one file each.

May import every folder of the front, and nothing that needs torch.
"""
