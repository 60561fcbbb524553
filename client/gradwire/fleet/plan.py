"""The file that describes a fleet."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradwire.errors import did_you_mean

BRANCHES = ("constrained-int", "literal['all']", "int", "float", "str", "list[str]")
"""Names that pydantic adds to an error's location for each type of a union field."""
NAME = r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?"


class PlanError(Exception):
    """The file cannot be used; the message says where and why."""


class Group(BaseModel):
    """Engines that are alike, each on one node.

    Attributes:
        name: The engines are called NAME-0, NAME-1, and so on, by the server, too.
        engines: How many; "all" for as many as the nodes have room for.
        cpus, gpus, resources: Resources that Ray reserves for each, on one node. An engine has as many ranks as GPUs.
        options: Options of `gradwire engine`, as ``{model: [tiny=/models/tiny], threads: 4}``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=f"^{NAME}$")]
    engines: Annotated[int, Field(ge=0)] | Literal["all"] = "all"
    cpus: Annotated[float, Field(ge=0)] = 1
    gpus: Annotated[int, Field(ge=0)] = 0
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    options: dict[str, str | int | float | list[str]] = {}

    @property
    def bundle(self) -> dict[str, float]:
        """The resources that one engine requests of a node, under Ray's names."""
        whole = {"CPU": self.cpus, "GPU": float(self.gpus), **self.resources}
        return {name: amount for name, amount in whole.items() if amount}

    def words(self) -> list[str]:
        """The options as they are written on a command line."""
        options = {"ranks": self.gpus, **self.options} if self.gpus else self.options
        each = [
            (name, one) for name, given in options.items() for one in (given if isinstance(given, list) else [given])
        ]
        return [word for name, one in each for word in (f"--{name.replace('_', '-')}", str(one))]


class Plan(BaseModel):
    """A fleet.

    Attributes:
        front: The server, as ``https://HOST:50051``.
        ca_cert: PEM file on the nodes with the authority that signed its certificate; the system's when absent.
        groups: The engines.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    front: str
    ca_cert: str = ""
    groups: Annotated[tuple[Group, ...], Field(min_length=1)]

    def group_of(self, engine: str) -> Group | None:
        """The group of the engine with this name."""
        name, _, number = engine.rpartition("-")
        return next((group for group in self.groups if group.name == name and number.isdigit()), None)

    def command(self, engine: str) -> list[str]:
        """The arguments of the program `gradwire` with which the agent of this engine is started."""
        group = self.group_of(engine)
        assert group is not None
        trusted = ["--ca-cert", self.ca_cert] if self.ca_cert else []
        return ["engine", "--front", self.front, "--name", engine, *trusted, *group.words(), "--die-with-parent"]


def read_plan(file: Path) -> Plan:
    """Read a fleet's file.

    Raises:
        PlanError: It cannot be read, or describes no fleet.
    """
    try:
        plan = Plan.model_validate(yaml.safe_load(file.read_text()))
    except OSError as error:
        raise PlanError(f"{file} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise PlanError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise PlanError(f"{file}: {_sentence(error.errors())}") from error
    names = [group.name for group in plan.groups]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise PlanError(f"{file}: two groups are called {twice}")
    if not re.fullmatch(r"https?://[^/\s]+:\d+", plan.front):
        raise PlanError(f"{file}: front must be https://HOST:PORT of the server's gRPC, not {plan.front[:100]!r}")
    return plan


def _sentence(faults: Sequence[Any]) -> str:
    """One sentence on a file's first fault: the field, the rule, and how to mend it."""
    fault = min(faults, key=lambda each: each["type"] != "extra_forbidden")  # a misspelt field is missing, too
    place = [str(each) for each in fault["loc"] if each not in BRANCHES]
    in_group, value = len(place) > 1, fault["input"]
    where, known = ".".join(place) or "the file", (Group if in_group else Plan).model_fields
    says = {
        "extra_forbidden": f"there is no such field{did_you_mean(''.join(place[-1:]), known)}: {', '.join(known)}",
        "missing": "this field is missing",
        "model_type": f"must have fields, as `{'name: far' if in_group else 'front: https://HOST:50051'}`",
        "string_pattern_mismatch": f"must be of a-z, 0-9 and hyphens, 40 at most, not {value!r}",
    }
    if place[-1:] == ["engines"]:
        return f"{where}: must be a number or all, not {value!r}"
    if "options" in place[:-1]:
        return f"{where}: must be a text, a number or a list of texts, not {value!r}"
    return f"{where}: {says.get(fault['type'], fault['msg'])}"
