"""An object of the policy's code, as seen by the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Remote:
    """A proxy for an object of the program. It never equals a value of this process.

    It is not ordered relative to such values either, and the result of a calculation with it is not such a value:
    otherwise an object could claim to be equal to the expected value. ``in`` compares its elements. ``operate``
    performs an operation of the program by its name.
    """

    def __init__(self, operate: Callable[..., Any], number: int, kind: str) -> None:
        self._operate, self._number, self._kind = operate, number, kind

    def __getattr__(self, name: str) -> Any:
        return self._operate("getattr", self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._operate("call", self, *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._operate("iter", self)
        while True:
            try:
                yield self._operate("next", iterator)
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._operate("next", self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._operate("eq", self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return int(self._operate("hash", self))

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and self._operate("isinstance", instance, self) is True

    def __enter__(self) -> Any:
        return self._operate("enter", self)

    def __exit__(self, *_: object) -> None:
        self._operate("exit", self)

    def __repr__(self) -> str:
        return f"<{self._kind} of the policy's code>"

    def __str__(self) -> str:
        return str(self._operate("str", self))


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: Remote, other: Any) -> Any:
        value = self._operate(name, self, other)
        if not isinstance(other, Remote) and not isinstance(value, Remote):
            raise TypeError(f"{self!r} is not a number: only the program could compute {name} with it")
        return value

    return operate


def _comparison(name: str) -> Callable[..., Any]:
    def compare(self: Remote, other: Any) -> Any:
        return self._operate(name, self, other) is True if isinstance(other, Remote) else NotImplemented

    return compare


def _method(name: str, kind: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda self, *args: kind(self._operate(name, self, *args))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor"):
    setattr(Remote, f"__{_name.rstrip('_')}__", _operator(_name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _comparison(_name))
for _name in ("getitem", "setitem", "delitem", "neg"):
    setattr(Remote, f"__{_name}__", _method(_name, lambda value: value))
for _name, _type in {"len": int, "bool": bool, "int": int, "float": float}.items():
    setattr(Remote, f"__{_name}__", _method(_name, _type))
