"""The engine: the process that holds models and runs, and executes one ordered stream of operations.

Folders, from the outermost layer to the innermost: ``process``, ``operations``, the file ``step``, ``sampling``,
``state``, ``sizing``, ``training``, ``scoring``, ``model``. From the rest of the server it imports only
``engine_link``, ``observability`` and ``crash_points``.
"""

import logging

# peft imports bitsandbytes where it is installed, and that warns of a kernel that it does without on a CPU.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
