"""The engine's process: command line, request loop, answers, heartbeat.

May import every other folder of the engine.
"""
