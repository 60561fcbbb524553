"""What docs/architecture.md says of the code is true: files exist, and the three things that are added are added so."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.operations.table import HANDLERS, SHARED_HANDLERS
from gradwire_server.operation_kinds import KINDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = ("gradwire", "gradwire_server", "gradwire_losses", "gradwire_proto", "gradwire_feedback")


def walk() -> list[str]:
    section = PAGE.partition("## One batch's walk")[2].partition("\n## ")[0]
    return re.findall(r"`((?:client|server|losses|proto)/[\w/]+\.py)`", section)


def test_the_walk_names_files_that_exist() -> None:
    files = walk()
    assert len(files) == len(set(files)) > 20
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_every_folder_of_the_server_is_on_the_page_and_says_what_is_in_it() -> None:
    server = ROOT / "server" / "gradwire_server"
    folders = {path.parent.relative_to(server).as_posix() for path in server.rglob("__init__.py")} - {"."}
    folders -= {folder for folder in folders if folder.startswith(("engine/model/", "engine/sampling/"))}  # by subject
    named = set(re.findall(r"`([\w/]+)/`", PAGE.partition("## Folders of the server")[2].partition("\n## ")[0]))
    assert folders - named <= {"doors", "engine"} and named <= folders
    for folder in folders:
        assert "import" in (server / folder / "__init__.py").read_text() or folder == "doors/grpc", folder


def test_an_operation_is_a_message_a_row_and_a_handler() -> None:
    messages = {field.name for field in pb.Operation.DESCRIPTOR.oneofs_by_name["kind"].fields}
    assert messages == set(KINDS) == HANDLERS.keys() | SHARED_HANDLERS.keys() | {"sample"}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_files_import_each_other(package: str) -> None:
    """Imports for type checking count too: a file can be read once those that it names have been."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=False)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert len(list(TopologicalSorter(imports).static_order())) == len(imports)  # a CycleError names the circle
