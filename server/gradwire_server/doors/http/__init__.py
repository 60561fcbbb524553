"""The HTTP doors: one listener for several protocols, each a folder with its routes.

What the protocols share is here: the listener, keys, limits and decompression of bodies, errors, metrics. A protocol is
a :class:`.protocol.HttpProtocol`: the prefix of its paths, a FastAPI application, and the form of its errors. Protocols
do not import each other, but for ``anthropic``, which is a translation into the conversations of ``openai``.

May import: ``core`` and what is below it, FastAPI and uvicorn.
"""
