"""The policy: linear heads for the modes and the value, over the features of a request.

``N`` rows, ``F`` features, ``C`` columns (features and their products), ``M`` modes. Log-probabilities in
nats, float64 throughout.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.router.features import FeatureSpace, Floats
from gradwire.whole_files import whole_file

Parameters = dict[str, Floats]
PARAMETERS = ("policy_weight", "policy_bias", "value_weight", "value_bias")


def log_softmax(logits: Floats) -> Floats:
    """``[N, M] -> [N, M]``; rows may hold ``-inf`` beside finite numbers."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


class LinearPolicy:
    """Categorical over modes by a softmax of ``x W + b``; the value is ``x w + c``.

    Args:
        features: The columns. If there are products, every ``x`` below may be with or without them.
        modes: The names of the modes, in the order of the logits.
        parameters: ``policy_weight [C, M]``, ``policy_bias [M]``, ``value_weight [C]``, ``value_bias []``; zeros by
            default, which is the uniform policy.

    Raises:
        ValueError: Modes are empty or repeated, or parameters have the wrong shape or are not finite.
    """

    def __init__(
        self, features: FeatureSpace, modes: Sequence[str], parameters: Mapping[str, npt.ArrayLike] | None = None
    ) -> None:
        self.features, self.modes = features, tuple(modes)
        if not self.modes or len(set(self.modes)) != len(self.modes):
            raise ValueError("a policy needs at least one mode, and each only once")
        shapes = {
            "policy_weight": (len(features.columns), len(self.modes)),
            "policy_bias": (len(self.modes),),
            "value_weight": (len(features.columns),),
            "value_bias": (),
        }
        self.parameters: Parameters = {name: np.zeros(shape) for name, shape in shapes.items()}
        for name, values in (parameters or {}).items():
            if name not in shapes:
                raise ValueError(f"there is no parameter {name!r}; they are {', '.join(PARAMETERS)}")
            array = np.array(values, dtype=np.float64)
            if array.shape != shapes[name]:
                raise ValueError(f"{name} has shape {array.shape}; it must have {shapes[name]}")
            if not np.isfinite(array).all():
                raise ValueError(f"{name} holds numbers that are not finite")
            self.parameters[name] = array

    def copy(self) -> LinearPolicy:
        """Return a copy of the policy."""
        return LinearPolicy(self.features, self.modes, self.parameters)

    def logits(self, x: Floats) -> Floats:
        """``[N, F] -> [N, M]``."""
        result: Floats = self.features.expand(x) @ self.parameters["policy_weight"] + self.parameters["policy_bias"]
        return result

    def logprobs(self, x: Floats, legal: npt.NDArray[np.bool_] | None = None) -> Floats:
        """``[N, F] -> [N, M]``: log-probability of every mode; ``-inf`` where ``legal [N, M]`` is False."""
        logits = self.logits(x)
        return log_softmax(logits if legal is None else np.where(legal, logits, -np.inf))

    def values(self, x: Floats) -> Floats:
        """``[N, F] -> [N]``: the expected reward from here to the end of the episode."""
        result: Floats = self.features.expand(x) @ self.parameters["value_weight"] + self.parameters["value_bias"]
        return result

    def act(
        self, x: Floats, rng: np.random.Generator | None = None, legal: npt.NDArray[np.bool_] | None = None
    ) -> tuple[npt.NDArray[np.int64], Floats]:
        """Choose a mode for each row.

        Args:
            x: ``[N, F]``.
            rng: Random generator for sampling; None takes the most likely mode.
            legal: ``[N, M]``, the modes to choose from; all by default.

        Returns:
            Modes ``[N]`` and their log-probabilities ``[N]`` under the policy.
        """
        logprobs = self.logprobs(x, legal)
        if rng is None:
            modes = logprobs.argmax(axis=-1)
        else:
            # The first mode whose cumulative probability exceeds the draw; rounding must not pass the end.
            reached = np.exp(logprobs).cumsum(axis=-1)
            modes = (reached <= rng.random(len(x))[:, None] * reached[:, -1:]).sum(axis=-1)
        return modes, logprobs[np.arange(len(x)), modes]

    def save(self, path: Path | str) -> None:
        """Write the policy to an ``.npz`` file atomically."""
        names = {
            "feature_names": self.features.names,
            "stage_names": self.features.stage_names,
            "modes": self.modes,
        }
        arrays: dict[str, Any] = {name: np.array(given, dtype=np.str_) for name, given in names.items()}
        if self.features.products:
            arrays["products"] = np.array(self.features.products, dtype=np.str_)
        arrays |= self.parameters
        with whole_file(path) as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path | str) -> LinearPolicy:
        """Read a file written by :meth:`save`; never unpickles.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is not a policy; the message says what is wrong.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no policy at {path}")
        try:
            with np.load(path, allow_pickle=False) as stored:
                names = [tuple(map(str, stored[name])) for name in ("feature_names", "stage_names", "modes")]
                pairs = stored["products"].tolist() if "products" in stored else []
                features = FeatureSpace(names[0], names[1], tuple((first, second) for first, second in pairs))
                return cls(features, names[2], {name: stored[name] for name in PARAMETERS})
        except (KeyError, ValueError, zipfile.BadZipFile, OSError, EOFError, AttributeError, TypeError) as error:
            raise ValueError(f"{path} is not a policy written by LinearPolicy.save: {error}") from None
