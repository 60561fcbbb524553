"""The engine: a process of its own that holds models and runs and carries out one ordered stream of operations.

This package imports nothing itself, so that the front may use ``gradwire_server.engine.link`` without torch.
"""
