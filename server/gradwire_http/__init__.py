"""Parts of every HTTP application of this project: access, limits of JSON, and child processes.

The doors of the server, the feedback service and later applications use it; it knows none of them.

May import: numpy, pydantic, starlette. Nothing of ours.
"""
