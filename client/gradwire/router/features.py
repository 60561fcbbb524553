"""The features of a request, by name and in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Features = Mapping[str, float | str] | npt.ArrayLike

LARGEST = 1e30
BOUNDS = f"features must be finite numbers up to {LARGEST:g}"


@dataclass(frozen=True)
class FeatureSpace:
    """Names of the columns of a feature vector, and of the products that a policy uses in addition.

    Attributes:
        names: One per column. ``"domain=math"`` is the column of one value of the category ``domain``: 1 if the
            request's domain is ``math``, else 0.
        stage_names: The last columns, which describe the progress of a collaboration. They are 0 when a request is
            routed and may then be left out.
        products: Pairs of request features. A policy has a weight for each product as well, so that it is linear in
            products of features; see :meth:`with_interactions`.
    """

    names: tuple[str, ...]
    stage_names: tuple[str, ...] = ()
    products: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            raise ValueError("two features have the same name; names must be unique")
        if self.stage_names and self.names[-len(self.stage_names) :] != self.stage_names:
            raise ValueError(f"the stage features {', '.join(self.stage_names)} must be the last of the names")
        for pair in self.products:
            for name in pair:
                if name not in self.request_names:
                    raise ValueError(
                        f"the product {' x '.join(pair)} needs {name!r}, which is not a feature of a request"
                    )

    def with_interactions(self) -> FeatureSpace:
        """Return these features with the products of any two request features, including squares of numbers.

        The values of one category exclude each other, and have no products among themselves.
        """
        pairs = combinations_with_replacement(self.request_names, 2)
        categories = [(pair, [name.partition("=")[0::2] for name in pair]) for pair in pairs]
        kept = tuple(pair for pair, ((a, is_one), (b, _)) in categories if a != b or not is_one)
        return FeatureSpace(self.names, self.stage_names, kept)

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The columns of the policy's weights, in order: the features, then the products as ``"length x urgency"``."""
        return (*self.names, *(" x ".join(pair) for pair in self.products))

    @property
    def request_names(self) -> tuple[str, ...]:
        """The columns that a request must state: all but the stage's."""
        return self.names[: len(self.names) - len(self.stage_names)]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    @cached_property
    def _factors(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        first, second = ([self._places[pair[side]] for pair in self.products] for side in (0, 1))
        return np.array(first, dtype=np.int64), np.array(second, dtype=np.int64)

    def expand(self, x: Floats) -> Floats:
        """Append the products, ``[..., features] -> [..., columns]``; input that already has them is returned
        unchanged."""
        if not self.products or x.shape[-1] != len(self.names):
            return x
        first, second = self._factors
        return np.concatenate([x, x[..., first] * x[..., second]], axis=-1)

    @cached_property
    def _categories(self) -> dict[str, tuple[str, ...]]:
        categories: dict[str, list[str]] = {}
        for name in self.names:
            category, equals, value = name.partition("=")
            if equals:
                categories.setdefault(category, []).append(value)
        return {category: tuple(values) for category, values in categories.items()}

    @cached_property
    def _required(self) -> frozenset[str]:
        return frozenset(name for name in self.request_names if "=" not in name) | frozenset(self._categories)

    def vector(self, features: Features) -> Floats:
        """Convert one request to numbers, ``[features]``, without products.

        Args:
            features: By name, a category as ``{"domain": "math"}``; or the numbers in the order of ``names``, with or
                without the stage's.

        Raises:
            ValueError: A feature is missing, unknown, of the wrong kind or not finite; names the feature.
        """
        if isinstance(features, Mapping):
            return self._from_mapping(features)
        numbers = np.asarray(features, dtype=np.float64)
        if numbers.shape not in ((len(self),), (len(self.request_names),)):
            raise ValueError(
                f"features have shape {numbers.shape}; this policy takes {len(self.request_names)} numbers: "
                f"{', '.join(self.request_names)}"
            )
        vector = np.zeros(len(self))
        vector[: len(numbers)] = numbers
        if not np.abs(vector).max() <= LARGEST:
            worst = int(np.argmax(np.where(np.isnan(vector), np.inf, np.abs(vector))))
            raise ValueError(f"feature {self.names[worst]!r} is {vector[worst]}; {BOUNDS}")
        return vector

    def _from_mapping(self, features: Mapping[str, float | str]) -> Floats:
        vector = np.zeros(len(self))
        seen = 0
        for name, value in features.items():
            if name in self._categories:
                if f"{name}={value}" not in self._places:
                    values = ", ".join(self._categories[name])
                    raise ValueError(f"feature {name!r} is {value!r}; it can be one of {values}")
                vector[self._places[f"{name}={value}"]] = 1.0
            elif name in self._places:
                vector[self._places[name]] = self._number(name, value)
            else:
                raise ValueError(f"there is no feature {name!r}; this policy takes {', '.join(sorted(self._required))}")
            seen += name in self._required
        if seen < len(self._required):
            missing = self._missing(features)
            if missing:
                raise ValueError(f"features are missing: {', '.join(missing)}")
        return vector

    def _missing(self, features: Mapping[str, float | str]) -> list[str]:
        """Required names that are given neither directly nor, for a category, column by column."""
        columns = {name.partition("=")[0] for name in features if "=" in name}
        return sorted(self._required - set(features) - columns)

    @staticmethod
    def _number(name: str, value: float | str) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"feature {name!r} is {value!r}, which is not a number") from None
        if not abs(number) <= LARGEST:
            raise ValueError(f"feature {name!r} is {number}; {BOUNDS}")
        return number
