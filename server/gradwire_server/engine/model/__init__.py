"""Models and their parts: loading, where tensors live, trunk and heads, adapters, packing, attention, tokenizers.

May import: ``errors`` and the other single files of ``engine``.
"""

import sys

if "peft" not in sys.modules and "bitsandbytes" not in sys.modules:
    # peft imports bitsandbytes for one function of its helpers, which is not used here. That takes a fifth of the
    # engine's start (1.0 of 4.8 s of CPU). Where a model is held in 4 or 8 bits, bitsandbytes is imported then.
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # None: an import fails, and is tried again later
    try:
        import peft  # noqa: F401
    finally:
        del sys.modules["bitsandbytes"]
