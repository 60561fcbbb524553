"""The path of an operation from acceptance to its stored result: admission, run queues, dispatch, replay, results.

May import: ``journal``, ``access``, ``engine_client``, ``observability``.
"""
