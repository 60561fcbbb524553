"""The engine's process: its command line, the loop over requests, the answers, the heartbeat.

May import every other folder of the engine.
"""
