"""What every HTTP application of this project shares: who may ask, how large JSON may be, and child processes.

The doors of the server, the feedback service and later applications use it; it knows none of them.

May import: numpy, pydantic, starlette. Nothing of ours.
"""
