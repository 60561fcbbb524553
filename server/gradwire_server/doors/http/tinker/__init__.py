"""The Tinker door: the protocol of the ``tinker`` SDK, under ``/api/v1``.

May import: the files of ``doors/http``, ``core`` and what is below it.
"""
