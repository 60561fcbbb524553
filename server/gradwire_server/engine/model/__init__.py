"""Models and their parts: loading, where tensors live, trunk and heads, adapters, packing, attention, tokenizers.

May import: ``errors`` and the other single files of ``engine``.
"""

import sys


def _import_peft() -> None:
    """Import peft without what it and accelerate import for functions that are not used here.

    That takes a fifth of the engine's start where they are installed: bitsandbytes 1.0 s of CPU, boto3 0.1 s.
    Where a model is held in 4 or 8 bits, bitsandbytes is imported then.
    """
    left_out = {name for name in ("bitsandbytes", "boto3") if name not in sys.modules}
    for name in left_out:
        sys.modules[name] = None  # type: ignore[assignment]  # an import fails, and is tried again later
    try:
        import peft  # noqa: F401
    finally:
        for name in left_out:
            del sys.modules[name]


if "peft" not in sys.modules:
    _import_peft()
