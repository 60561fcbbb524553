"""The files that sealed code may read: Python's library, shared libraries, time zones, and listed packages."""

from __future__ import annotations

import functools
import os
import re
import sysconfig
from importlib.metadata import Distribution, PackageNotFoundError, distribution

PACKAGES = (
    "numpy", "scipy", "pandas", "sympy", "scikit-learn", "rapidfuzz", "nltk", "rouge-score", "sacrebleu", "math-verify",
    "jsonschema", "pydantic", "PyYAML", "deepdiff", "sqlparse",
)  # fmt: skip
"""Packages that others' code may import where they are installed, with those that they need."""
NOT_OF_PYTHON = ("site-packages", "dist-packages", "test", "idlelib", "lib2to3", "ensurepip", "__pycache__")
"""In the folder of Python's library."""
_NAME = re.compile(r"[A-Za-z0-9._-]+")


@functools.cache
def places() -> dict[str, list[str]]:
    """The folders and files that are ``shown``, those that there are, and what of them is ``hidden``."""
    machine = sysconfig.get_config_var("MULTIARCH") or ""
    libraries = ["/lib64", "/usr/lib64", f"/lib/{machine}", f"/usr/lib/{machine}", "/etc/ld.so.cache"]
    library = os.path.realpath(sysconfig.get_path("stdlib"))
    hidden = [os.path.join(library, each) for each in NOT_OF_PYTHON]
    known = [library, *libraries, "/usr/share/zoneinfo", *map(os.path.realpath, _packages())]
    kept: list[str] = []
    for place in sorted({each for each in known if os.path.exists(each)}, key=len):
        above = [each for each in (*kept, *hidden) if place.startswith(each + "/")]
        if not above or max(above, key=len) in hidden:
            kept.append(place)
    return {"shown": kept, "hidden": [each for each in hidden if os.path.isdir(each)]}


def _packages() -> list[str]:
    found: dict[str, Distribution] = {}
    wanted = list(PACKAGES)
    while wanted:
        name = wanted.pop()
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        if package.name not in found:
            found[package.name] = package
            needs = (each for each in package.requires or () if "extra ==" not in each)
            wanted += [match[0] for each in needs if (match := _NAME.match(each))]
    tops = {package.locate_file(file.parts[0]) for package in found.values() for file in package.files or ()}
    return [str(each) for each in tops if ".." not in str(each) and not str(each).endswith("__pycache__")]
