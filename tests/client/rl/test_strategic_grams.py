"""Which grams are strategic, and which tokens have them."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire.rl import GramCluster, StrategicGrams, find_strategic_grams
from gradwire.rl.generation import TokenizerCodec
from gradwire.rl.strategic_grams import hashed_ngrams, leader_clusters, token_texts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

PLANS = ("Let me try another way.", "let me try another approach:", "Let me check this.")


def solutions() -> list[str]:
    """Twelve: each has a plan, and content of its own problem that two solutions share."""
    fruits = ["apples pears plums", "cats dogs mice", "red green blue", "iron gold tin", "oak elm ash", "one ten six"]
    return [f"We have {fruits[n // 2]} here. {PLANS[n % 3]} So {n} is it" for n in range(12)]


def reference(texts: list[str], labels: dict[str, int], top_share: float) -> list[tuple[set[str], int]]:
    """The procedure in words, on sets: clusters with the number of solutions that contain any of their grams."""

    def grams(text: str) -> set[str]:
        words = "".join(c.lower() if c.isalnum() else " " for c in text).split()
        return {" ".join(words[i : i + n]) for n in (3, 4, 5) for i in range(len(words) - n + 1)}

    clusters = [{g for g, label in labels.items() if label == each} for each in sorted(set(labels.values()))]
    counted = [(cluster, sum(bool(cluster & grams(text)) for text in texts)) for cluster in clusters]
    counted.sort(key=lambda each: -each[1])
    return counted[: math.ceil(top_share * len(counted))]


def test_the_procedure_is_the_papers() -> None:
    texts, seen = solutions(), []

    def embed(grams: Any) -> Any:
        seen.extend(grams)
        return np.eye(len(grams))

    def cluster(vectors: Any) -> list[int]:
        # One cluster for all that has the word "me", one for each other gram; the last gram is noise.
        return [0 if "me" in gram.split() else 1 + i for i, gram in enumerate(seen[:-1])] + [-1]

    found = find_strategic_grams(texts, embed=embed, cluster=cluster)
    labels = dict(zip(seen[:-1], cluster(None)[:-1]))
    expected = reference(texts, labels, 0.2)
    assert [each.solutions for each in found.clusters] == [count for _, count in expected]
    assert set(found.clusters[0].grams) == expected[0][0] and found.clusters[0].solutions == 12
    assert (found.num_solutions, found.num_clusters) == (12, len(set(labels.values())))
    assert len(found.clusters) == math.ceil(0.2 * found.num_clusters)


def test_by_default_plans_are_found_and_content_is_not() -> None:
    found = find_strategic_grams(solutions())
    assert {"let me try", "let me try another"} <= found.grams
    assert not any(word in gram.split() for gram in found.grams for word in ("apples", "dogs", "gold", "elm"))
    assert found == find_strategic_grams(solutions())  # the same every time


def test_grams_of_one_solution_are_left_out() -> None:
    assert not any("11" in gram.split() for gram in find_strategic_grams(solutions(), top_share=1.0).grams)
    assert any("11" in gram.split() for gram in find_strategic_grams(solutions(), top_share=1.0, min_solutions=1).grams)


def test_the_default_embedding_sees_shared_words() -> None:
    grams = ["let us try this", "let us try that", "seven times eight"]
    vectors = hashed_ngrams(grams)
    cosine = lambda a, b: float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))  # noqa: E731
    assert cosine(vectors[0], vectors[1]) > 0.6 > 0.2 > abs(cosine(vectors[0], vectors[2]))


def test_leaders_are_followed_by_what_is_near() -> None:
    angles = np.radians([0, 10, 90, 85, 45])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert leader_clusters(vectors, similarity=math.cos(math.radians(20))).tolist() == [0, 0, 1, 1, 2]
    assert leader_clusters(vectors, similarity=-1.0).tolist() == [0] * 5


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "no run of 3, 4, 5 words is in 2 or more of the 0 solutions"),
        (["a b", "a b"], {}, "lower min_solutions"),
        (["a b c"] * 2, {"top_share": 0}, "top_share"),
        (["a b c"] * 2, {"embed": lambda grams: [1.0]}, r"embed returned the shape \[1\] for 1 grams"),
        (["a b c"] * 2, {"cluster": lambda vectors: [0, 0]}, r"cluster returned the shape \[2\] for 1 grams"),
    ],
)
def test_what_cannot_be_is_said(texts: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_strategic_grams(texts, **options)


def test_one_text_is_not_several() -> None:
    with pytest.raises(TypeError, match="a list of texts"):
        find_strategic_grams("let us try this")


GRAMS = StrategicGrams((GramCluster(("let us try", "it's the same way"), 3), GramCluster(("us try it",), 2)), 9, 10)


def test_tokens_of_a_gram_are_marked() -> None:
    pieces = ["So", " L", "et", " us", "  ", "try", ".", " it", "", " now"]
    assert "".join(pieces) == "So Let us  try. it now"
    # "Let us  try" and "us  try. it": what is between words belongs to the gram, white space alone is no token of it
    assert GRAMS.planning_mask(pieces).tolist() == [False, True, True, True, False, True, True, True, False, False]
    assert GRAMS.planning_mask([]).tolist() == [] and GRAMS.planning_mask([""]).tolist() == [False]
    assert GRAMS.planning_mask(list("It's the same way")).tolist() == [c != " " for c in "It's the same way"]


def test_spans_are_those_of_the_reference() -> None:
    rng = np.random.default_rng(0)
    words = ["let", "us", "try", "it", "now"]
    for _ in range(50):
        text = " ".join(rng.choice(words, 12))
        starts = [i for i in range(len(text)) if i == 0 or text[i - 1] == " "]
        expected = {
            (start, start + len(gram))
            for start, gram in itertools.product(starts, GRAMS.grams)
            if text[start:].split()[: gram.count(" ") + 1] == gram.split()
        }
        assert set(GRAMS.spans(text)) == expected


def test_they_are_kept_in_a_file(tmp_path: Path) -> None:
    GRAMS.save(tmp_path / "grams.json")
    assert StrategicGrams.load(tmp_path / "grams.json") == GRAMS
    (tmp_path / "other.json").write_text('{"clusters": 3}')
    with pytest.raises(ValueError, match=r"other\.json holds no strategic grams"):
        StrategicGrams.load(tmp_path / "other.json")


async def test_the_texts_of_tokens_make_the_text_of_their_row() -> None:
    """With a tokenizer that loses the space before a lone token."""
    words = {word: index for index, word in enumerate(["▁let", "▁us", "▁t", "ry", "▁now"])}
    tokenizer = Tokenizer(models.WordLevel(words | {"?": len(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    rows = [[0, 1, 2, 3, 4], [4], []]
    texts = await token_texts(TokenizerCodec(tokenizer), rows)
    assert texts == [["let", " us", " t", "ry", " now"], ["now"], []]
    assert GRAMS.planning_mask(texts[0]).tolist() == [True, True, True, True, False]
