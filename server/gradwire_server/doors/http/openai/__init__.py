"""The OpenAI door: the API of OpenAI's clients, under ``/v1``.

May import: the files of ``doors/http``, ``core`` and what is below it.
"""
