"""The file ``run.json`` of a run's folder: what of the run's row does not follow from its operations."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import json_format
from gradwire_proto.v1 import journal_pb2

from gradwire_server.checkpoint_files import read_sealed, sealed
from gradwire_server.durable_files import make_folder, replace_text

RUN_FILE = "run.json"


def write_description(folder: Path, description: journal_pb2.RunDescription) -> None:
    """Write the file; durable when this returns.

    Args:
        folder: The run's folder, which is made if it is missing.
    """
    make_folder(folder)
    text = sealed(json_format.MessageToDict(description, preserving_proto_field_name=True))
    replace_text(folder / RUN_FILE, text)


def read_description(folder: Path) -> journal_pb2.RunDescription | None:
    """The description of a run; None if its folder has none, or one that is damaged."""
    try:
        return json_format.ParseDict(read_sealed(folder / RUN_FILE), journal_pb2.RunDescription())
    except (OSError, ValueError, KeyError, TypeError, json_format.ParseError):
        return None


def described_runs(runs: Path) -> set[str]:
    """Ids of the runs whose folders have the file."""
    return {file.parent.name for file in runs.glob(f"*/{RUN_FILE}")}
