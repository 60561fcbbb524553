"""The engine: a process of its own that holds models and runs and carries out one ordered stream of operations.

Its folders, from the outside in: ``process``, ``operations``, ``sampling``, ``state``, ``training``, ``scoring``,
``model``. Of the rest of the server it imports ``engine_link``, ``observability`` and ``crash_points`` only.
"""
