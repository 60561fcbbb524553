"""Strategic grams: phrases of planning in correct solutions, selected by how many solutions use a phrase's cluster.

The procedure of "Emergent Hierarchical Reasoning in LLMs through Reinforcement Learning" (arXiv 2509.03646): take the
3- to 5-grams of correct solutions, embed and cluster them, count for each cluster the solutions that contain any of its
grams, and keep the top fifth of clusters. A gram is a run of lower-case words joined by single spaces.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gradwire.rl.generation import TextCodec

Floats = npt.NDArray[np.float64]
Embedding = Callable[[Sequence[str]], npt.ArrayLike]
"""Grams -> ``[grams, dimensions]``; a sentence transformer's ``encode`` is an example."""
Clustering = Callable[[Floats], npt.ArrayLike]
"""``[grams, dimensions]``, rows of length 1 -> ``[grams]`` int labels, -1 for none; for example HDBSCAN's
``fit_predict``."""

GRAM_LENGTHS = (3, 4, 5)
WORD = re.compile(r"\w+(?:['’]\w+)*")


@dataclass(frozen=True)
class GramCluster:
    """Grams of similar meaning, and the number of correct solutions that contain any of them."""

    grams: tuple[str, ...]
    solutions: int


@dataclass(frozen=True)
class StrategicGrams:
    """The strategic grams that mark planning tokens.

    Attributes:
        clusters: The selected clusters, the most used first.
        num_solutions: Number of solutions counted.
        num_clusters: Number of clusters before the selection.
    """

    clusters: tuple[GramCluster, ...]
    num_solutions: int = 0
    num_clusters: int = 0

    @cached_property
    def grams(self) -> frozenset[str]:
        """Every gram of every selected cluster."""
        return frozenset(gram for cluster in self.clusters for gram in cluster.grams)

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(sorted({gram.count(" ") + 1 for gram in self.grams}))

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Find the strategic grams in a text: start and end character positions; overlapping matches are separate."""
        return [span for gram, span in _grams_of(text, self._lengths) if gram in self.grams]

    def planning_mask(self, token_texts: Sequence[str]) -> npt.NDArray[np.bool_]:
        """``[tokens]``: whether each token has a character (other than white space) of a strategic gram.

        Args:
            token_texts: The texts of a response's tokens, which form its text when joined; see :func:`token_texts`.
        """
        text = "".join(token_texts)
        inside = np.zeros(len(text), bool)
        for start, end in self.spans(text):
            inside[start:end] = True
        inside &= np.array([not character.isspace() for character in text], bool)
        sizes = np.array([len(each) for each in token_texts], np.int64)
        ends, counts = sizes.cumsum(), np.concatenate([[0], inside.cumsum()])
        marked: npt.NDArray[np.bool_] = counts[ends] > counts[ends - sizes]
        return marked

    def save(self, path: Path | str) -> None:
        """Write a JSON file that :meth:`load` reads."""
        Path(path).write_text(json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> StrategicGrams:
        """Read a file written by :meth:`save`.

        Raises:
            ValueError: The file is not such a file; names it.
        """
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
            clusters = tuple(GramCluster(tuple(each["grams"]), each["solutions"]) for each in stored["clusters"])
            return cls(clusters, stored["num_solutions"], stored["num_clusters"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no strategic grams: {error!r}") from None


def find_strategic_grams(
    solutions: Sequence[str],
    *,
    lengths: Sequence[int] = GRAM_LENGTHS,
    top_share: float = 0.2,
    min_solutions: int = 2,
    embed: Embedding | None = None,
    cluster: Clustering | None = None,
) -> StrategicGrams:
    """Find the strategic grams of correct solutions.

    Args:
        solutions: Texts of correct solutions of many tasks; phrases that only one task repeats are content, not
            strategy.
        lengths: Lengths of the grams, in words.
        top_share: Share of clusters to keep, by the number of solutions that contain any of their grams; rounded up.
        min_solutions: Grams in fewer solutions are dropped before the clustering.
        embed: Embeds the grams; by default :func:`hashed_ngrams`, which compares spelling, not meaning.
        cluster: Labels the vectors; by default :func:`leader_clusters`.

    Raises:
        ValueError: No gram is in enough solutions, or a function returned the wrong shape.
        TypeError: One text was given instead of several.
    """
    if isinstance(solutions, str):
        raise TypeError("solutions must be a list of texts, got one text")
    if not 0 < top_share <= 1:
        raise ValueError(f"top_share must be above 0 and at most 1, got {top_share}")
    containing: dict[str, set[int]] = defaultdict(set)
    for index, solution in enumerate(solutions):
        for gram, _ in _grams_of(solution, lengths):
            containing[gram].add(index)
    # The most used first: the default clustering makes them leaders; ties are broken by spelling.
    grams = sorted(
        (gram for gram, where in containing.items() if len(where) >= min_solutions),
        key=lambda gram: (-len(containing[gram]), gram),
    )
    if not grams:
        sizes = ", ".join(map(str, lengths))
        raise ValueError(
            f"no run of {sizes} words is in {min_solutions} or more of the {len(solutions)} solutions; give more of "
            "them, or a lower min_solutions"
        )
    vectors = np.asarray((embed or hashed_ngrams)(grams), dtype=np.float64)
    if vectors.ndim != 2 or len(vectors) != len(grams):
        raise ValueError(
            f"embed returned the shape {list(vectors.shape)} for {len(grams)} grams, not [grams, dimensions]"
        )
    labels = np.asarray((cluster or leader_clusters)(_unit(vectors)))
    if labels.shape != (len(grams),):
        raise ValueError(f"cluster returned the shape {list(labels.shape)} for {len(grams)} grams, not [grams]")
    members: dict[int, list[str]] = defaultdict(list)
    for gram, label in zip(grams, labels.tolist()):
        if label >= 0:
            members[label].append(gram)
    clusters = [
        GramCluster(tuple(each), len(set().union(*map(containing.__getitem__, each)))) for each in members.values()
    ]
    clusters.sort(key=lambda each: (-each.solutions, each.grams[0]))
    return StrategicGrams(tuple(clusters[: math.ceil(top_share * len(clusters))]), len(solutions), len(clusters))


def _grams_of(text: str, lengths: Sequence[int]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Find every gram of the text with its position."""
    words = list(WORD.finditer(text))
    lower = [word[0].lower() for word in words]
    for length in lengths:
        for first in range(len(words) - length + 1):
            last = first + length
            yield " ".join(lower[first:last]), (words[first].start(), words[last - 1].end())


def hashed_ngrams(grams: Sequence[str], *, dimensions: int = 512, size: int = 3) -> Floats:
    """``[grams, dimensions]``: hashed counts of each gram's words and runs of ``size`` characters.

    Grams that share words and spelling are similar ("let us try", "let us try to"). The paper uses a sentence
    embedding, which also recognises synonyms: pass its ``encode`` as ``embed``.
    """
    vectors = np.zeros((len(grams), dimensions))
    for row, gram in enumerate(grams):
        padded = f" {gram} "
        pieces = [padded[at : at + size] for at in range(len(padded) - size + 1)] + gram.split(" ")
        for piece in pieces:
            code = zlib.crc32(piece.encode())
            vectors[row, code % dimensions] += 1.0 if code & 1 << 31 else -1.0
    return vectors


def leader_clusters(vectors: Floats, *, similarity: float = 0.6) -> npt.NDArray[np.int64]:
    """``[grams]``: assign each row, in order, to the most similar leader's cluster, or make it a new leader.

    Args:
        vectors: ``[grams, dimensions]``, rows of length 1.
        similarity: Minimum cosine similarity to a leader.

    Leader clustering (Hartigan 1975): one pass, a deterministic result, and time proportional to rows times
    leaders.
    """
    leaders = np.empty_like(vectors)
    count = 0
    labels = np.empty(len(vectors), np.int64)
    for row, vector in enumerate(vectors):
        cosines = leaders[:count] @ vector
        nearest = int(cosines.argmax()) if count else 0
        if count and cosines[nearest] >= similarity:
            labels[row] = nearest
        else:
            leaders[count], labels[row] = vector, count
            count += 1
    return labels


def _unit(vectors: Floats) -> Floats:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(norms > 0, norms, 1.0)


async def token_texts(codec: TextCodec, rows: Sequence[Sequence[int] | npt.NDArray[np.int64]]) -> list[list[str]]:
    """For each row, the text that each token adds to the tokens before it.

    A token decoded alone may give another text than after its neighbour (a stripped leading space, half a
    character), so pairs of tokens are decoded, each pair once.
    """
    ids = [tuple(int(token) for token in row) for row in rows]
    pieces = sorted({row[at : at + size] for row in ids for size in (1, 2) for at in range(len(row) - size + 1)})
    texts = dict(zip(pieces, await codec.decode(pieces) if pieces else []))
    return [
        [texts[row[:1]], *(texts[pair][len(texts[pair[:1]]) :] for pair in itertools.pairwise(row))] if row else []
        for row in ids
    ]
