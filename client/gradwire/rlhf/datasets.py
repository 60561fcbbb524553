"""Ratings and prompts: the training data of the two stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from gradwire.errors import InvalidArgumentError
from gradwire.rl.batching import derive_seed

Floats = npt.NDArray[np.float64]

MIN_FEEDBACK = 10
"""Minimum number of ratings for :meth:`gradwire.rlhf.RLHFTrainer.train`."""


class Feedback(NamedTuple):
    """One rating; a named tuple, which torch's ``DataLoader`` batches without a function of its own.

    Attributes:
        prompt: The prompt.
        response: The policy's answer.
        score: The rating, from 0 (bad) to 1 (excellent).
    """

    prompt: str
    response: str
    score: float

    @staticmethod
    def of(item: Any, place: str = "the feedback") -> Feedback:
        """Convert a mapping with these keys, or an object with these attributes; others are ignored.

        Args:
            item: The rating.
            place: Location for error messages, e.g. ``"feedbacks[3]"``.

        Raises:
            InvalidArgumentError: A field is missing or invalid; names it.
        """
        if isinstance(item, Feedback):
            return item
        texts = {name: _field(item, name, place) for name in ("prompt", "response")}
        for name, value in texts.items():
            if not isinstance(value, str):
                raise _wrong(place, name, f"{value!r:.80}", "a text")
        if not texts["prompt"]:
            raise _wrong(place, "prompt", "empty", "a text")
        score = _field(item, "score", place)
        if isinstance(score, bool) or not isinstance(score, int | float | np.number) or not 0 <= float(score) <= 1:
            raise _wrong(place, "score", f"{score!r:.80}", "a number from 0 to 1")
        return Feedback(texts["prompt"], texts["response"], float(score))


def _field(item: Any, name: str, place: str) -> Any:
    missing = object()
    value = item.get(name, missing) if isinstance(item, Mapping) else getattr(item, name, missing)
    if value is missing:
        raise InvalidArgumentError(
            f"{place} has no {name}; a rating needs prompt, response and score", field=name, rule="required"
        )
    return value


def _wrong(place: str, name: str, found: str, rule: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{place}: {name} is {found}; it must be {rule}", field=name, rule=rule)


class FeedbackDataset(Sequence[Feedback]):
    """Ratings with normalised scores.

    A reward model learns ``(score - mean) / std``: so its head, which starts near 0, starts at the mean rating, and the
    best learning rate does not depend on the scale that raters use. Torch's ``DataLoader`` takes it as a data set,
    though the client itself does not import torch.

    Args:
        feedbacks: See :meth:`Feedback.of`.
        mean: Mean of the normalisation; by default that of these scores.
        std: Standard deviation of the normalisation; by default that of these scores, or 1 if all are equal.

    Raises:
        InvalidArgumentError: A rating is invalid, or there are none.
    """

    def __init__(self, feedbacks: Iterable[Any], *, mean: float | None = None, std: float | None = None) -> None:
        self._items = tuple(Feedback.of(item, f"feedbacks[{index}]") for index, item in enumerate(feedbacks))
        if not self._items:
            raise InvalidArgumentError(
                "there are no ratings; at least one is needed", field="feedbacks", rule="not empty"
            )
        scores = self.scores
        self.mean = float(scores.mean()) if mean is None else mean
        self.std = (float(scores.std()) or 1.0) if std is None else std

    @property
    def scores(self) -> Floats:
        """``[ratings]``, the original scores."""
        return np.array([item.score for item in self._items], np.float64)

    @property
    def normalized_scores(self) -> Floats:
        """``[ratings]``: ``(scores - mean) / std``."""
        result: Floats = (self.scores - self.mean) / self.std
        return result

    @property
    def prompts(self) -> list[str]:
        """The distinct prompts, in the order of their first rating."""
        return list(dict.fromkeys(item.prompt for item in self._items))

    def split(self, validation_fraction: float = 0.2, seed: int = 0) -> tuple[FeedbackDataset, FeedbackDataset | None]:
        """Split into training and validation ratings. All ratings of one prompt are on one side.

        Args:
            validation_fraction: Share of the prompts used for validation, at least one prompt; below 1.
            seed: Seed of the choice, which does not depend on the order of the ratings.

        Returns:
            Both sets, normalised by the training scores. The second is None if there is only one prompt, or the
            fraction is 0.
        """
        learned, held_out = split_prompts(self.prompts, validation_fraction, seed)
        train = FeedbackDataset(item for item in self._items if item.prompt in learned)
        if not held_out:
            return train, None
        items = [item for item in self._items if item.prompt in held_out]
        return train, FeedbackDataset(items, mean=train.mean, std=train.std)

    @overload
    def __getitem__(self, index: int) -> Feedback: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Feedback]: ...
    def __getitem__(self, index: int | slice) -> Feedback | Sequence[Feedback]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


class PPODataset(Sequence[str]):
    """The distinct prompts that the policy trains on.

    Args:
        prompts: Texts, or ratings, whose prompts are used.
    """

    def __init__(self, prompts: Iterable[Any]) -> None:
        texts = [
            item if isinstance(item, str) else _field(item, "prompt", f"prompts[{index}]")
            for index, item in enumerate(prompts)
        ]
        self._prompts = list(dict.fromkeys(texts))
        if not self._prompts or not all(isinstance(text, str) and text for text in self._prompts):
            raise InvalidArgumentError(
                "prompts must be texts: at least one, and none of them empty", field="prompts", rule="texts"
            )

    def split(self, validation_fraction: float = 0.2, seed: int = 0) -> tuple[PPODataset, PPODataset | None]:
        """Split like :meth:`FeedbackDataset.split`: the same prompts, fraction and seed give the same choice."""
        learned, held_out = split_prompts(self._prompts, validation_fraction, seed)
        train = PPODataset(text for text in self._prompts if text in learned)
        return train, PPODataset(text for text in self._prompts if text in held_out) if held_out else None

    def batches(self, batch_size: int, seed: int = 0) -> Iterator[list[str]]:
        """Yield batches without end, in a new order each epoch."""
        from gradwire.rl.curricula import ShuffledCurriculum

        order = ShuffledCurriculum(self._prompts, seed=seed)
        step = 0
        while True:
            yield [str(task.prompt) for task in order.select(step, batch_size)]
            step += 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._prompts[index]

    def __len__(self) -> int:
        return len(self._prompts)


def split_prompts(prompts: Sequence[str], validation_fraction: float, seed: int) -> tuple[set[str], set[str]]:
    """Split prompts into training and validation prompts."""
    if not 0 <= validation_fraction < 1 or math.isnan(validation_fraction):
        raise InvalidArgumentError(
            f"validation_fraction is {validation_fraction}; it must be at least 0 and below 1",
            field="validation_fraction",
            rule="0 <= validation_fraction < 1",
        )
    ordered = sorted(set(prompts))
    wanted = max(1, round(len(ordered) * validation_fraction)) if validation_fraction and len(ordered) > 1 else 0
    wanted = min(wanted, len(ordered) - 1)
    chosen = np.random.default_rng(derive_seed(seed, "validation")).permutation(len(ordered))[:wanted]
    held_out = {ordered[index] for index in chosen}
    return set(ordered) - held_out, held_out
