"""Checks of uploads: what the second upload with the same settings costs the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from support.engine import LocalEngine


def described(folder: Path, **changes: str) -> engine_pb2.EngineCheckUpload:
    """The files of an exported adapter as their upload announces them, with changes in its settings."""
    settings = (folder / "adapter_config.json").read_text()
    for old, new in changes.items():
        settings = settings.replace(old, new)
    weights = (folder / "adapter_model.safetensors").read_bytes()
    header = weights[8 : 8 + int.from_bytes(weights[:8], "little")]
    files = [
        pb.UploadFile(name="adapter_config.json", head=settings.encode()),
        pb.UploadFile(name="adapter_model.safetensors", head=header),
    ]
    return engine_pb2.EngineCheckUpload(
        request=pb.BeginUploadRequest(kind="adapter", base_model="tiny", files=files),
    )


def test_a_model_is_built_once_for_uploads_with_the_same_settings(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building one takes longer than most operations, which wait meanwhile."""
    engine = LocalEngine({"tiny": tiny_model_path}, tmp_path)
    engine.create("run-a", lora=2)
    engine.do("run-a", export=pb.ExportModel(name="adapter", format="peft"))
    folder = next(tmp_path.rglob("adapter_config.json")).parent
    first, _ = engine.request(check_upload=described(folder))
    assert first.upload.lora.rank == 2

    built: list[str] = []
    meta_model = engine.context.pool.meta_model
    monkeypatch.setattr(engine.context.pool, "meta_model", lambda name: built.append(name) or meta_model(name))
    again, _ = engine.request(check_upload=described(folder, **{'"revision": null': '"revision": "2"'}))
    assert (again.upload, built) == (first.upload, [])
    other, _ = engine.request(check_upload=described(folder, **{'"r": 2': '"r": 3'}))
    assert "must be [3," in other.error.message and built == ["tiny"]
