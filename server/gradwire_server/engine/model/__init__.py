"""Models and their parts: loading, where tensors live, trunk and heads, adapters, packing, attention, tokenizers.

May import: ``errors`` and the other single files of ``engine``.
"""

import sys
from importlib.util import find_spec, module_from_spec


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


def _import_models() -> None:
    """Import the package ``transformers.models`` without its names, which transformers itself has read already.

    Its own code reads all 3,000 files of models for them a second time (0.3 s of CPU); its modules are found as before.
    """
    import transformers

    spec = find_spec("transformers.models")
    assert spec is not None
    models = module_from_spec(spec)
    models.__getattr__ = lambda name: getattr(transformers, name)  # type: ignore[method-assign]
    sys.modules[spec.name] = models


if "peft" not in sys.modules:
    if "transformers.models" not in sys.modules:
        _import_models()
    _import_peft()
