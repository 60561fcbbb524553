"""The numbers that a policy sees of a request, by name and in order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Features = Mapping[str, float | str] | npt.ArrayLike


@dataclass(frozen=True)
class FeatureSpace:
    """Names of the columns of a feature vector.

    Attributes:
        names: one a column. ``"domain=math"`` is the column of one value of the category ``domain``: 1 where the
            request's domain is ``math``, else 0.
        stage_names: the last columns, which describe how far a collaboration has come. They are 0 when a request is
            routed and may then be left out.
    """

    names: tuple[str, ...]
    stage_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            raise ValueError("two features have one name; give each its own")
        if self.stage_names and self.names[-len(self.stage_names) :] != self.stage_names:
            raise ValueError(f"the stage features {', '.join(self.stage_names)} must be the last of the names")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def request_names(self) -> tuple[str, ...]:
        """The columns that a request must state: all but the stage's."""
        return self.names[: len(self.names) - len(self.stage_names)]

    @cached_property
    def _columns(self) -> dict[str, int]:
        return {name: column for column, name in enumerate(self.names)}

    @cached_property
    def _categories(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {}
        for name in self.names:
            category, equals, value = name.partition("=")
            if equals:
                found.setdefault(category, []).append(value)
        return {category: tuple(values) for category, values in found.items()}

    @cached_property
    def _required(self) -> frozenset[str]:
        return frozenset(name for name in self.request_names if "=" not in name) | frozenset(self._categories)

    def vector(self, features: Features) -> Floats:
        """``[features]``: one request as numbers.

        Args:
            features: by name, a category as ``{"domain": "math"}``; or the numbers in the order of ``names``, with or
                without the stage's.

        Raises:
            ValueError: for a feature that is missing, unknown, of the wrong kind or not finite; it names the feature.
        """
        if isinstance(features, Mapping):
            return self._from_mapping(features)
        given = np.asarray(features, dtype=np.float64)
        if given.shape not in ((len(self),), (len(self.request_names),)):
            raise ValueError(
                f"features have shape {given.shape}; this policy takes {len(self.request_names)} numbers: "
                f"{', '.join(self.request_names)}"
            )
        vector = np.zeros(len(self))
        vector[: len(given)] = given
        if not math.isfinite(vector.sum()):  # one call in place of two: this is on the way of every request
            raise ValueError(f"feature {self.names[int(np.argmin(np.isfinite(vector)))]!r} is not finite")
        return vector

    def _from_mapping(self, features: Mapping[str, float | str]) -> Floats:
        vector = np.zeros(len(self))
        seen = 0
        for name, value in features.items():
            if name in self._categories:
                if f"{name}={value}" not in self._columns:
                    values = ", ".join(self._categories[name])
                    raise ValueError(f"feature {name!r} is {value!r}; it can be one of {values}")
                vector[self._columns[f"{name}={value}"]] = 1.0
            elif name in self._columns:
                vector[self._columns[name]] = self._number(name, value)
            else:
                raise ValueError(f"there is no feature {name!r}; this policy takes {', '.join(sorted(self._required))}")
            seen += name in self._required
        if seen < len(self._required):
            missing = self._missing(features)
            if missing:
                raise ValueError(f"features are missing: {', '.join(missing)}")
        return vector

    def _missing(self, features: Mapping[str, float | str]) -> list[str]:
        """Required names that are given neither plainly nor, of a category, column by column."""
        columns = {name.partition("=")[0] for name in features if "=" in name}
        return sorted(self._required - set(features) - columns)

    @staticmethod
    def _number(name: str, value: float | str) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"feature {name!r} is {value!r}, which is no number") from None
        if not math.isfinite(number):
            raise ValueError(f"feature {name!r} is {number}; features are finite numbers")
        return number
