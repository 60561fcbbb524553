"""The tokenizers of a process: what it says of files that it cannot read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.errors import ServiceError
from gradwire_server.limits import Limits
from gradwire_server.tokenizing.settings import METHODS, TokenizerSettings
from gradwire_server.tokenizing.tokenizers import Tokenizers


@pytest.mark.parametrize("method", METHODS)
def test_a_damaged_tokenizer_is_named(tiny_model_path: Path, tmp_path: Path, method: str) -> None:
    folder = shutil.copytree(tiny_model_path, tmp_path / "damaged")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text()[:500])
    models = {"tiny": str(folder)}
    settings = TokenizerSettings(
        files={"tiny": str(file)}, models=models, named_first=("tiny",), limits=Limits(), memory_bytes=1 << 30
    )
    asked = (
        pb.EncodeRequest(model="tiny", texts=["a"]) if method == "Encode" else pb.GetTokenizerInfoRequest(model="tiny")
    )
    with pytest.raises(ServiceError, match=f"the model 'tiny', {file}, cannot be read: EOF") as error:
        Tokenizers(settings).answer(method, "me", asked.SerializeToString())
    assert error.value.code == pb.ERROR_CODE_UNSUPPORTED
