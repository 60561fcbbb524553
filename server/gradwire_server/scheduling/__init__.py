"""From an accepted operation to its stored result: admission, one queue a run, dispatch, replay, results, checkpoints.

May import: ``journal``, ``access``, ``engine_client``, ``observability``.
"""
