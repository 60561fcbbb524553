"""Optional libraries: imported at first use, with an error that says what to install."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, extra: str, why: str) -> Any:
    """Import and return a module.

    Raises:
        ImportError: The module is not installed; names ``gradwire[extra]``.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.split(".")[0] != error.name.split(".")[0]:
            raise
        raise ImportError(f"{why} needs {module}: pip install 'gradwire[{extra}]'", name=module) from None
