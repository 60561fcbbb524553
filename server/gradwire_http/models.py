"""A pydantic model for bodies that strangers send: the first wrong entry ends the validation."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

SEQUENCES = ("list", "tuple", "set", "frozenset")
PLAIN = ("any", "str")
"""Schemas of keys and values that JSON always fulfils, or fulfils at the first."""


def _fail_fast(node: Any, name: str) -> None:
    if isinstance(node, dict):
        if node.get("type") in SEQUENCES:
            node["fail_fast"] = True
        if node.get("type") == "dict" and node.get("values_schema", {"type": "any"})["type"] not in PLAIN:
            raise TypeError(f"{name} has a mapping whose values could each be wrong: declare dict[str, Any]")
        for each in node.values():
            _fail_fast(each, name)
    elif isinstance(node, list | tuple):
        for each in node:
            _fail_fast(each, name)


class BoundedModel(BaseModel):
    """A model of which a body gets one error, however many of its entries are wrong.

    Raises:
        TypeError: When the class is made: a field is a mapping whose values could each be wrong. Declare it as
            ``dict[str, Any]``, and check its values one by one.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """pydantic's schema, with lists that end at their first error, and one error for all unknown fields."""
        schema = handler(source)
        _fail_fast(schema, cls.__name__)
        if cls.model_config.get("extra") != "forbid":
            return schema
        known = set(cls.model_fields) | {each.alias for each in cls.model_fields.values() if each.alias}

        def with_one_unknown(values: Any) -> Any:
            unknown = [name for name in values if name not in known] if isinstance(values, dict) else []
            if len(unknown) < 2:
                return values
            return {name: value for name, value in values.items() if name in known or name is unknown[0]}

        return core_schema.no_info_before_validator_function(with_one_unknown, schema)
