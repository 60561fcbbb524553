"""What every HTTP application of this project shares: who may ask (browsers), and how large JSON may be.

The doors of the server, the feedback service and later applications use it; it knows none of them.

May import: numpy, pydantic, starlette. Nothing of ours.
"""
