"""Data sets for training: conversations and texts, preference pairs, rated answers, steps, prompts with answers.

:func:`conversations`, :func:`preferences`, :func:`ratings`, :func:`steps` and :func:`prompts` read JSONL, CSV, Parquet
and text files, Hugging Face data sets (``gradwire[data]``) and iterables of rows. Common column layouts are recognised;
``mapping=`` names any other.
"""

from gradwire.data.dataset import Batches, Dataset, mixed, split_together
from gradwire.data.loaders import LOADERS, OnError, conversations, kind_of, preferences, prompts, ratings, steps
from gradwire.data.rows import Conversation, Preference, Prompt, Rating, Steps, learned
from gradwire.data.sources import DataError, read
from gradwire.data.two_tokenizers import Expectations, gold_fields, padded_candidates, shared_tokens

__all__ = [
    "LOADERS",
    "Batches",
    "Conversation",
    "DataError",
    "Dataset",
    "Expectations",
    "OnError",
    "Preference",
    "Prompt",
    "Rating",
    "Steps",
    "conversations",
    "gold_fields",
    "kind_of",
    "learned",
    "mixed",
    "padded_candidates",
    "preferences",
    "prompts",
    "ratings",
    "read",
    "shared_tokens",
    "split_together",
    "steps",
]
