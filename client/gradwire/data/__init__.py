"""Data sets for training: conversations, preference pairs, prompts with answers.

:func:`conversations`, :func:`preferences` and :func:`prompts` read JSONL, CSV and Parquet files, Hugging Face data sets
(``gradwire[data]``) and iterables of rows. Common column layouts are recognised; ``mapping=`` names any other.
"""

from gradwire.data.dataset import Batches, Dataset, OnError, conversations, preferences, prompts
from gradwire.data.layouts import Conversation, Preference, Prompt, learned
from gradwire.data.sources import DataError, read

__all__ = [
    "Batches",
    "Conversation",
    "DataError",
    "Dataset",
    "OnError",
    "Preference",
    "Prompt",
    "conversations",
    "learned",
    "preferences",
    "prompts",
    "read",
]
