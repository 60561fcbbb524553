"""Adapters and whole models uploaded from a local folder, and the runs that start from them."""

from __future__ import annotations

import json
import re
import shutil
import signal
import struct
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import gradwire
import grpc.aio
import numpy as np
import pytest
import torch
from gradwire.cli.app import app
from gradwire.errors import (
    ConnectionLostError,
    InvalidArgumentError,
    LimitExceededError,
    UnknownCheckpointError,
    UnsupportedError,
)
from gradwire.wire.transport import Transport
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.training_pb2_grpc import TrainingServiceStub
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.keyed import code_of, outcome
from support.plain_peft import with_adapter
from support.server import Server
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

ROWS: Any = [[1, 20, 21, 22, 23], [1, 30, 31, 32, 33, 34]]
BATCH = {"input_ids": ROWS}


def make_adapter(model: Path, folder: Path, **settings: Any) -> Path:
    """A PEFT adapter with random weights, named for its base model by the folder's name."""
    options = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(**options | settings))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    adapted.save_pretrained(folder)
    return folder


def change(folder: Path, to: Path, **settings: Any) -> Path:
    """A copy of an adapter with other settings."""
    shutil.copytree(folder, to)
    file = to / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return to


def scores(model: Any) -> list[np.ndarray]:
    """Log-probabilities of the rows' tokens, by transformers or peft."""
    found = []
    with torch.no_grad():
        for row in ROWS:
            ids = torch.tensor([row])
            logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            found.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy())
    return found


@pytest.fixture(scope="module")
def adapter(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tiny_model_path, tmp_path_factory.mktemp("adapters") / "plain")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_modules": "all-linear", "lora_alpha": 4, "lora_dropout": 0.1},
        {"target_modules": r".*\.(q|k|v)_proj", "use_rslora": True},
        {"target_modules": ["q_proj", "lm_head"]},
    ],
    ids=["modules", "all-linear", "regex, rslora", "output head"],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:Setting `save_embedding_layers`")
async def test_a_run_from_an_adapter_computes_what_peft_does(
    service: gradwire.ServiceClient, tiny_model_path: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    folder = make_adapter(tiny_model_path, tmp_path / "adapter", **settings)
    upload = await service.upload_adapter(folder)
    assert upload.ready and upload.base_model == "tiny" and upload.received_bytes == upload.size_bytes
    run = await service.create_run(from_adapter=upload)
    expected = scores(with_adapter(tiny_model_path, folder))
    for ours, theirs in zip(await run.compute_logprobs(ROWS), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    info = await run.info()
    assert info.from_upload == upload.upload_id and info.lora is not None and info.lora == upload.lora
    assert (info.lora["rank"], info.lora["dropout"]) == (4, settings.get("lora_dropout", 0.0))
    base = scores(AutoModelForCausalLM.from_pretrained(tiny_model_path))
    assert np.abs(expected[0] - base[0]).max() > 0.01
    assert [each.upload_id for each in await service.list_uploads()].count(upload.upload_id) == 1
    await service.delete_upload(upload)
    for ours, theirs in zip(await run.compute_logprobs(ROWS), expected, strict=True):  # it has its own copy
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


async def test_its_settings_are_the_adapters(service: gradwire.ServiceClient, adapter: Path) -> None:
    upload = await service.upload_adapter(adapter)
    assert upload.lora == {"rank": 4, "alpha": 6.0, "dropout": 0.0, "target_modules": ["q_proj", "up_proj"]}
    same = await service.create_run(
        "tiny", lora={"rank": 4, "alpha": 6, "target_modules": ["up_proj", "q_proj"], "dropout": 0.2},
        from_adapter=upload.upload_id, head="value",
    )  # fmt: skip
    info = await same.info()
    assert info.lora == dict(upload.lora) | {"dropout": 0.2} and info.head == "value"
    for field, lora in [
        ("lora.rank", 8), ("lora.alpha", {"alpha": 8}), ("lora.target_modules", {"target_modules": ["q_proj"]}),
    ]:  # fmt: skip
        with pytest.raises(InvalidArgumentError, match="the uploaded adapter's is") as refused:
            await service.create_run("tiny", lora=lora, from_adapter=upload)  # type: ignore[arg-type]
        assert refused.value.field == field
    with pytest.raises(UnknownCheckpointError, match="there is no upload 'upload-nothing'"):
        await service.create_run(from_adapter="upload-nothing")


def without(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder


def with_tensors(folder: Path, changed: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    file = folder / "adapter_model.safetensors"
    save_file(changed(load_file(file)), file)
    return folder


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:Setting `save_embedding_layers`")
async def test_a_base_weight_within_an_adapter_must_be_the_bases(
    service: gradwire.ServiceClient, tiny_model_path: Path, tmp_path: Path
) -> None:
    def trained(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: each * 1.5 if "base_layer" in name else each for name, each in tensors.items()}

    folder = make_adapter(tiny_model_path, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    with pytest.raises(InvalidArgumentError, match="a weight of 'lm_head' that is not that of the base model 'tiny'"):
        await service.upload_adapter(with_tensors(folder, trained))


def wider(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(4, 33) if name.endswith("0.self_attn.q_proj.lora_A.weight") else tensor
            for name, tensor in tensors.items()}  # fmt: skip


MISTAKES: dict[str, tuple[Callable[[Path], Path], type[Exception], str]] = {
    "no config": (lambda f: without(f, "adapter_config.json"), InvalidArgumentError, "has no adapter_config.json"),
    "no weights": (
        lambda f: without(f, "adapter_model.safetensors"),
        InvalidArgumentError,
        "no adapter_model.safe",
    ),
    "pickle": (
        lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin").parent,
        InvalidArgumentError,
        "adapter_model.bin is a pickle",
    ),
    "not there": (lambda f: f / "nowhere", InvalidArgumentError, "there is no folder"),
    "other base": (
        lambda f: change(f, f / "x", base_model_name_or_path="org/other-7b"),
        InvalidArgumentError,
        "was trained on 'org/other-7b', and this server has tiny",
    ),
    "DoRA": (lambda f: change(f, f / "x", use_dora=True), UnsupportedError, "use_dora=true"),
    "PiSSA": (lambda f: change(f, f / "x", init_lora_weights="pissa"), UnsupportedError, "initialised by 'pissa'"),
    "no LoRA": (lambda f: change(f, f / "x", peft_type="IA3"), UnsupportedError, "peft_type is 'IA3'"),
    "unknown module": (
        lambda f: change(f, f / "x", target_modules=["q_proj", "up_proj", "W_pack"]),
        InvalidArgumentError,
        "has no module 'W_pack'",
    ),
    "rank": (lambda f: change(f, f / "x", r=8), InvalidArgumentError, r"is \[4, 32\] and must be \[8, 32\]"),
    "shape": (lambda f: with_tensors(f, wider), InvalidArgumentError, r"is \[4, 33\] and must be \[4, 32\]"),
    "fewer tensors": (
        lambda f: with_tensors(f, lambda tensors: dict(list(tensors.items())[2:])),
        InvalidArgumentError,
        "they lack",
    ),
    "tensors of another": (
        lambda f: with_tensors(f, lambda tensors: {n.replace("layers.1", "layers.9"): t for n, t in tensors.items()}),
        InvalidArgumentError,
        "has no module 'model.layers.9",
    ),
    "broken JSON": (
        lambda f: [f, (f / "adapter_config.json").write_text("{")][0],  # type: ignore[list-item]
        InvalidArgumentError,
        "adapter_config.json",
    ),
    "no safetensors": (
        lambda f: [f, (f / "adapter_model.safetensors").write_bytes(b"hello, world, this is text")][0],  # type: ignore[list-item]
        InvalidArgumentError,
        "safetensors",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_mistakes_are_said_before_anything_is_sent(
    service: gradwire.ServiceClient, adapter: Path, tmp_path: Path, mistake: str
) -> None:
    made, kind, message = MISTAKES[mistake]
    folder = made(shutil.copytree(adapter, tmp_path / "adapter"))
    known = await service.list_uploads()
    with pytest.raises(kind, match=message):
        await service.upload_adapter(folder)
    assert await service.list_uploads() == known


async def test_links_are_sent_as_what_they_lead_to_and_broken_ones_are_told(
    service: gradwire.ServiceClient, adapter: Path, tmp_path: Path
) -> None:
    """The Hub's cache is made of links. Nothing on the server is a link of the client's."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in list(adapter.glob("*")):  # noqa: ASYNC240
        (linked / file.name).symlink_to(file)
    upload = await service.upload_adapter(linked)
    assert upload.upload_id in {each.upload_id for each in await service.list_uploads()}
    weights = linked / "adapter_model.safetensors"
    for target in (tmp_path / "gone", tmp_path, Path("/dev/zero"), weights):
        weights.unlink()
        weights.symlink_to(target)
        with pytest.raises((gradwire.GradwireError, OSError), match=re.escape(weights.name)):
            await service.upload_adapter(linked)


async def test_the_base_model_may_be_named(
    service: gradwire.ServiceClient, adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = change(adapter, tmp_path / "x", base_model_name_or_path="org/other-7b")
    upload = await service.upload_adapter(folder, base_model="tiny")
    assert upload.warnings == ("the adapter says that it was trained on 'org/other-7b'; it is used on 'tiny'",)
    assert "org/other-7b" in caplog.text


async def test_a_whole_model(service: gradwire.ServiceClient, tiny_model_path: Path, tmp_path: Path) -> None:
    """A fine-tune of the base's architecture, in several files, is what a full run starts from."""
    tuned = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    generator = torch.Generator().manual_seed(6)
    for parameter in tuned.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.05
    folder = tmp_path / "tuned"
    tuned.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    run = await service.create_run("tiny", from_checkpoint=folder)
    for ours, theirs in zip(await run.compute_logprobs(ROWS), scores(tuned), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    run.forward_backward(BATCH, "causal_lm")
    assert (await run.optim_step(1e-3)).step == 1
    for wrong, kind, message in [
        ({"lora": 4}, UnsupportedError, "LoRA runs share the server's copy"),
        ({"from_adapter": folder}, InvalidArgumentError, "one of from_adapter and from_checkpoint"),
    ]:
        with pytest.raises(kind, match=message):
            await service.create_run("tiny", from_checkpoint=folder, **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="from_checkpoint takes whole models"):
        await service.upload_adapter(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 3}))
    with pytest.raises(InvalidArgumentError, match=r"not those of the base model 'tiny': they also have 'model.layers"):
        await service.create_run("tiny", from_checkpoint=folder)
    (folder / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 0.5}))
    with pytest.raises(InvalidArgumentError, match=r"says rms_norm_eps=0.5, and the base model 'tiny' has"):
        await service.create_run("tiny", from_checkpoint=folder)
    (folder / "config.json").write_text(json.dumps(settings))
    next(folder.glob("model-00002*.safetensors")).unlink()
    with pytest.raises(InvalidArgumentError, match=r"could not be loaded by transformers|missing keys"):
        await service.create_run("tiny", from_checkpoint=folder)


async def test_code_that_uploaded_settings_name_is_never_run(
    service: gradwire.ServiceClient, adapter: Path, tiny_model_path: Path, tmp_path: Path
) -> None:
    """Python files and pickles are not sent; settings that name code are, and are refused or have no effect."""
    sprung = tmp_path / "sprung"
    code = f"import pathlib\npathlib.Path({str(sprung)!r}).touch()\nclass Evil: pass\n"
    named = {"auto_map": dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "evil.Evil")}
    whole = shutil.copytree(tiny_model_path, tmp_path / "whole")
    adapted = change(
        adapter,
        tmp_path / "adapted",
        auto_mapping={"base_model_class": "Evil", "parent_library": "evil"},
        **named,
    )
    for folder in (whole, adapted):
        (folder / "evil.py").write_text(code)
        torch.save({"x": _Trap(sprung)}, folder / "pytorch_model.bin")
        for file in ("config.json", "tokenizer_config.json", "adapter_config.json"):
            if (folder / file).exists():
                (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | named))
    for folder, options in ((whole, {"from_checkpoint": whole}), (adapted, {"from_adapter": adapted})):
        try:
            run = await service.create_run("tiny", **options)  # type: ignore[arg-type]
        except (InvalidArgumentError, UnsupportedError) as refusal:
            assert "auto_map" in str(refusal), (folder, refusal)
        else:
            await run.forward_backward(BATCH, "causal_lm")
            await run.delete()
    assert not sprung.exists()


class _Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._file,)


async def trained(run: gradwire.TrainingClient, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss, step = run.forward_backward(BATCH, "causal_lm"), run.optim_step(1e-2)
        losses.append((await loss).loss)
        await step
    return losses  # type: ignore[return-value]


def _with_header(content: bytes, header: bytes, length: int | None = None) -> bytes:
    """A file of safetensors with another header; ``length`` is what it says of it."""
    told = len(header) if length is None else length
    return struct.pack("<Q", told) + header + content[8 + struct.unpack("<Q", content[:8])[0] :]


def _header_of(content: bytes) -> bytes:
    return content[8 : 8 + struct.unpack("<Q", content[:8])[0]]


def _shaped(content: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    header = json.loads(_header_of(content))
    change(next(each for name, each in header.items() if name != "__metadata__"))
    return _with_header(content, json.dumps(header).encode())


FALSE: dict[str, Callable[[bytes], bytes]] = {
    "a header of 2**63 bytes": lambda file: _with_header(file, _header_of(file), 2**63),
    "a header of 2**62 bytes": lambda file: _with_header(file, _header_of(file), 2**62),
    "a header of 2**37 bytes": lambda file: _with_header(file, _header_of(file), 2**37),
    "no header": lambda file: _with_header(file, b"", 0),
    "a deep header": lambda file: _with_header(file, b"[" * 100_000),
    "no JSON": lambda file: _with_header(file, b"\xff" * 64),
    "another shape": lambda file: _shaped(file, lambda each: each.update(shape=each["shape"][::-1])),
    "a shape beyond all numbers": lambda file: _shaped(file, lambda each: each.update(shape=[2**62, 2**62])),
    "a negative shape": lambda file: _shaped(file, lambda each: each.update(shape=[-4, -32])),
    "data elsewhere": lambda file: _shaped(file, lambda each: each.update(data_offsets=[2**40, 2**40 + 512])),
    "another dtype": lambda file: _shaped(file, lambda each: each.update(dtype="I32")),
    "an unknown dtype": lambda file: _shaped(file, lambda each: each.update(dtype="F4096")),
    "half of it": lambda file: file[: len(file) // 2],
    "nothing": lambda file: b"",
}  # fmt: skip
"""Changes of a file of weights; its description is that of the right one, or is changed too."""


@pytest.mark.slow  # 28 uploads
async def test_files_that_are_not_what_their_headers_say_are_refused(server: Server, adapter: Path) -> None:
    right = {name: (adapter / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    engine = server.engine_pid
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = TrainingServiceStub(channel)

        async def code(weights: bytes, head: bytes) -> str:
            """What an upload ends with, or a run from it."""
            files = {**right, "adapter_model.safetensors": weights}
            heads = {"adapter_config.json": right["adapter_config.json"], "adapter_model.safetensors": head}
            asked = pb.BeginUploadRequest(kind="adapter", base_model="tiny", files=[
                pb.UploadFile(name=name, size_bytes=len(content), digest=blake2b(content, digest_size=32).digest(),
                              head=heads[name])
                for name, content in files.items()
            ])  # fmt: skip
            begun = await outcome(stub, "BeginUpload", asked)
            if isinstance(begun, pb.Error):
                return code_of(begun)
            for name, content in files.items():
                await stub.WriteUpload(pb.WriteUploadRequest(upload_id=begun.upload_id, file=name, chunk=content))
            ended = await outcome(stub, "FinishUpload", pb.FinishUploadRequest(upload_id=begun.upload_id))
            await outcome(stub, "DeleteUpload", pb.DeleteUploadRequest(upload_id=begun.upload_id))
            return code_of(ended)

        good = right["adapter_model.safetensors"]
        assert await code(good, _header_of(good)) == "yes"
        wrong = []
        for name, make in FALSE.items():
            bad = make(good)
            for head in (_header_of(good), bad[8 : 8 + int.from_bytes(bad[:8], "little")]):
                if (found := await code(bad, head)) != ("payload_corrupt" if head and not bad else "invalid_argument"):
                    wrong.append((name, found))
        assert wrong == [] and server.engine_pid == engine


@pytest.mark.slow
async def test_runs_from_an_upload_survive_kills_and_forks(
    tiny_model_path: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload that was cut off continues after kill -9 of the server; so does a run from it, without the upload."""
    server = Server(tiny_model_path, tmp_path / "state", "--limit", "key_upload_bytes=100000").start()
    sent: list[str] = []
    unary = Transport.unary

    async def cut_off(self: Transport, method: Any, request: Any, **options: Any) -> Any:
        sent.append(type(request).__name__)
        if sent.count("WriteUploadRequest") == 2:
            raise ConnectionLostError("cut off")
        return await unary(self, method, request, **options)

    monkeypatch.setattr("gradwire.wire.uploads.CHUNK_BYTES", 3000)
    try:
        async with gradwire.connect(server.address, connect_timeout=120) as service:
            with monkeypatch.context() as patch:
                patch.setattr(Transport, "unary", cut_off)
                with pytest.raises(ConnectionLostError):
                    await service.upload_adapter(adapter)
            [begun] = await service.list_uploads()
            assert not begun.ready and 0 < begun.received_bytes < begun.size_bytes
            with pytest.raises(InvalidArgumentError, match="is not complete"):
                await service.create_run(from_adapter=begun)
        server.end(signal.SIGKILL)
        server.start()
        async with gradwire.connect(server.address, connect_timeout=120) as service:
            [begun] = await service.list_uploads()
            assert not begun.ready and begun.received_bytes > 0
            upload = await service.upload_adapter(adapter)
            assert upload.upload_id == begun.upload_id and upload.ready
            assert (await service.upload_adapter(adapter)).upload_id == upload.upload_id
            run, other = [await service.create_run(from_adapter=upload, seed=seed) for seed in (0, 1)]
            losses = await trained(run, 3)
            assert await trained(other, 1) == losses[:1]
            await service.delete_upload(upload)
            assert await service.list_uploads() == []
            run_id, other_id = run.run_id, other.run_id
            big = make_adapter(tiny_model_path, tmp_path / "big", r=32, target_modules="all-linear")
            with pytest.raises(LimitExceededError, match=r"its quota is 100000 .*key_upload_bytes"):
                await service.upload_adapter(big)
        server.end(signal.SIGKILL)
        server.start()
        async with gradwire.connect(server.address, connect_timeout=120) as service:
            other = service.get_training_client(other_id)
            assert await trained(other, 2) == losses[1:]
            saved = await other.save_checkpoint("end")
            fork = await service.fork_run(saved.path)
            last = service.get_training_client(run_id)
            for ours, theirs in zip(await fork.compute_logprobs(ROWS), await last.compute_logprobs(ROWS), strict=True):
                np.testing.assert_array_equal(ours, theirs)
            await other.export(tmp_path / "exported")
            again = await service.create_run(from_adapter=tmp_path / "exported")
            for ours, theirs in zip(await again.compute_logprobs(ROWS), await last.compute_logprobs(ROWS), strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-6)
    finally:
        server.end()


def test_the_blocking_client_and_the_command(server: Server, adapter: Path) -> None:
    with gradwire.sync.connect(server.address, connect_timeout=120) as service:
        run = service.create_run("tiny", from_adapter=adapter)
        assert run.info().lora == {"rank": 4, "alpha": 6.0, "dropout": 0.0, "target_modules": ["q_proj", "up_proj"]}
        ids = {each.upload_id for each in service.list_uploads()}
        upload_id = service.upload_adapter(adapter).upload_id
        assert upload_id in ids

    def run_command(*words: str) -> str:
        words = ("uploads", *words, "--address", server.address)
        return CliRunner().invoke(app, words, env={"COLUMNS": "200", "GRADWIRE_API_KEY": None}).output

    [row] = [line for line in run_command("list").splitlines() if upload_id in line]
    assert "adapter" in row and "tiny" in row and "all" in row
    assert run_command("delete", upload_id) == f"deleted {upload_id}\n"
    assert upload_id not in run_command("list")
    assert "there is no upload" in run_command("delete", upload_id)
