"""Griffe extension of the documentation site: roles such as :meth:`~a.b.C.d` become code, errors of futures a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|meth|func|mod|data|attr|exc):`(~?)([^`]+)`")


def without_roles(text: str) -> str:
    """Replace each role by its target as code; a leading ``~`` keeps only the last name."""
    return ROLE.sub(lambda role: f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`", text)


def with_listed_errors(text: str) -> str:
    """Make a list of the entries of ``Errors of the future:``, which is not a section of Google's style."""
    before, heading, block = text.partition("Errors of the future:\n")
    return before + heading + re.sub(r"^( +)(?=\w+(, \w+)*: )", r"\1- ", block, flags=re.MULTILINE)


class DocstringRoles(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = with_listed_errors(without_roles(obj.docstring.value))
