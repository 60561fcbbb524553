"""Griffe extension of the documentation site: show reStructuredText roles such as :meth:`~a.b.C.d` as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|meth|func|mod|data|attr|exc):`(~?)([^`]+)`")


def without_roles(text: str) -> str:
    """Replace each role by its target as code; a leading ``~`` keeps only the last name."""
    return ROLE.sub(lambda role: f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`", text)


class DocstringRoles(griffe.Extension):
    """Rewrites the roles of every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = without_roles(obj.docstring.value)
