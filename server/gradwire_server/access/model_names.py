"""The names by which callers may name models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.config import model_named
from gradwire_server.errors import ServiceError, invalid


@dataclass(frozen=True)
class ModelNames:
    """The models of a server.

    Attributes:
        paths: Path of each model that a caller may name, by name.
        named_first: Names of those that were loaded at the start; one alone need not be named where a name is optional.
    """

    paths: Mapping[str, str]
    named_first: Sequence[str] = ()

    def known(self, name: str) -> str | None:
        """The name of the model with this name or path; None if there is none."""
        return model_named(self.paths, name)

    def find(self, name: str, field: str) -> str:
        """The name of the model with this name or path.

        Raises:
            ServiceError: UNKNOWN_MODEL, with the known names.
        """
        found = self.known(name)
        if found is None:
            known = ", ".join(sorted(self.paths))
            raise ServiceError(
                pb.ERROR_CODE_UNKNOWN_MODEL,
                f"this server has no model {name[:200]!r}; it has {known} (`gradwire serve --model` and `--allow-model`"
                " add more)",
                field=field,
            )
        return found

    def find_or_only(self, name: str, field: str) -> str:
        """Find a model like :meth:`find`; an empty name is the server's only model.

        Raises:
            ServiceError: UNKNOWN_MODEL; INVALID_ARGUMENT for no name where there are several models.
        """
        if name:
            return self.find(name, field)
        if len(self.named_first) != 1:
            message = f"this server holds {', '.join(self.named_first) or 'no model'}: say which one, model=NAME"
            raise invalid(message, field)
        return self.named_first[0]
