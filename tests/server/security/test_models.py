"""Model folders and source code that could make the server run what it should only read."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.loading.pool import ModelPool
from support.engine import LocalEngine

ROOT = Path(__file__).parents[3]
CALLS = ("eval", "exec", "compile", "__import__", "pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib")
ATTRIBUTES = ("torch.load", "apply_chat_template", "trust_remote_code", "numpy.load", "np.load")


def folder(place: Path, model: Path, **config: object) -> Path:
    """A copy of a model that brings Python code, which would leave a file behind."""
    shutil.copytree(model, place)
    code = f"open({str(place / 'sprung')!r}, 'w').close()\nclass Config: pass\nclass Model: pass\n"
    (place / "evil.py").write_text(code)
    settings = json.loads((place / "config.json").read_text())
    settings |= {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, **config}
    (place / "config.json").write_text(json.dumps(settings))
    return place


def test_a_models_own_code_is_never_run(tmp_path: Path, tiny_model_path: Path) -> None:
    known = folder(tmp_path / "known", tiny_model_path)
    unknown = folder(tmp_path / "unknown", tiny_model_path, model_type="evil", architectures=["Model"])
    host = ModelPool({"known": str(known), "unknown": str(unknown)})
    assert host.get("known").facts.architecture == "LlamaForCausalLM"
    with pytest.raises(OperationError) as caught:
        host.facts("unknown")
    error = caught.value.to_proto()
    assert error.code == pb.ERROR_CODE_UNSUPPORTED and str(tmp_path) not in error.message
    assert not list(tmp_path.rglob("sprung"))


def test_only_models_that_were_allowed_are_looked_for(tmp_path: Path, tiny_model_path: Path) -> None:
    host = ModelPool({"tiny": str(tiny_model_path)})
    for name in (str(tiny_model_path), "../tiny", "org/model", ""):
        with pytest.raises(OperationError) as caught:
            host.get(name)
        assert caught.value.to_proto().code == pb.ERROR_CODE_UNKNOWN_MODEL


def test_an_allowed_model_is_read_when_it_is_first_named(tmp_path: Path, tiny_model_path: Path) -> None:
    allowed = {"later": str(tiny_model_path), "missing": str(tmp_path / "nowhere")}
    local = LocalEngine({"tiny": tiny_model_path}, tmp_path, allow_models=allowed)
    assert [model.name for model in local.engine.hello().models] == ["tiny"]
    assert local.create("run-a", base_model="later").run_created.num_trainable_parameters > 0
    assert local.create("run-b", base_model="missing").error.code == pb.ERROR_CODE_UNSUPPORTED
    assert local.create("run-c", base_model="other").error.code == pb.ERROR_CODE_UNKNOWN_MODEL


def runs_data(source: str) -> list[str]:
    """Names in a source that turn data into code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            found.append(node.func.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [name for name in names if name.partition(".")[0] in CALLS]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ATTRIBUTES:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                found.append("trust_remote_code")
        elif isinstance(node, ast.keyword) and node.arg == "shell" and ast.unparse(node.value) != "False":
            found.append("shell=True")
    return found


@pytest.mark.long
def test_nothing_that_runs_data_is_in_the_source() -> None:
    sources = [path for part in ("server", "losses", "proto") for path in (ROOT / part).rglob("*.py")]
    assert len(sources) > 60
    assert {str(path): found for path in sources if (found := runs_data(path.read_text()))} == {}
    assert runs_data("import pickle\neval('1')\ntorch.load(x)\nf(trust_remote_code=True)") == [
        "pickle", "eval", "torch.load", "trust_remote_code"]  # fmt: skip
