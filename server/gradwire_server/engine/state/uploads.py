"""Uploaded weights: whether they fit a base model, and their conversion to the checkpoint that runs start from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gradwire_proto.v1 import training_pb2 as pb
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from gradwire_server.engine.errors import OperationError, invalid
from gradwire_server.engine.generators import preserved_rng
from gradwire_server.engine.model.loading.configuration import ConfigurationError, make_configuration, without_weights
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.placement import whole
from gradwire_server.engine.model.vision.image_tokens import auto_class, takes_images
from gradwire_server.engine.state.adapter_shapes import AdapterShapes, Shapes
from gradwire_server.engine.state.checkpoints import write_checkpoint
from gradwire_server.engine.state.exports import PREFIX
from gradwire_server.engine.state.snapshot import WEIGHTS
from gradwire_server.stores.store import Store, upload_checkpoint, upload_files

ADAPTER, MODEL = "adapter", "model"
ADAPTER_CONFIG, MODEL_CONFIG = "adapter_config.json", "config.json"
MAX_HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file, by the format's definition."""
BASE_WEIGHT = ".base_layer.weight"
"""End of the name of a base weight, which peft saves with an adapter on the output head or the embedding."""
TAKEN = {"r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "init_lora_weights"}
"""Settings of peft that are taken over or checked."""
WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "loftq_config", "peft_type",
    "peft_version", "revision", "runtime_config", "task_type",
}  # fmt: skip
"""Settings of peft that do not change what an adapter computes on a base model."""
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initialisations of an adapter that leave the base model's weights as they are."""

NOT_COMPUTED = {
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype", "embd_pdrop", "eos_token_id",
    "id2label", "initializer_range", "label2id", "pad_token_id", "resid_pdrop", "torch_dtype", "transformers_version",
    "use_cache",
}  # fmt: skip
"""Settings of a model that do not change its logits."""


def check_upload(pool: ModelPool, shapes: AdapterShapes, request: pb.BeginUploadRequest) -> pb.Upload:
    """Check the descriptions of files against the base model; returns an upload with its settings of LoRA.

    Args:
        shapes: Shapes of adapters on the pool's models.

    Raises:
        OperationError: INVALID_ARGUMENT or UNSUPPORTED, saying what does not fit.
    """
    configs = {file.name: _json(file) for file in request.files if file.name.endswith(".json")}
    uploaded: Shapes = {}
    for file in request.files:
        if file.name.endswith(".safetensors"):
            uploaded |= {name: tuple(entry["shape"]) for name, entry in _tensors(file).items()}
    if request.kind == ADAPTER:
        settings = _lora_settings(configs.get(ADAPTER_CONFIG, {}), uploaded)
        _check_adapter(shapes, request.base_model, settings, uploaded)
        return pb.Upload(lora=settings)
    _check_model(pool, request.base_model, configs.get(MODEL_CONFIG, {}), uploaded)
    return pb.Upload()


def import_upload(pool: ModelPool, shapes: AdapterShapes, store: Store, upload: pb.Upload) -> None:
    """Write the checkpoint of an upload from its complete files, which are checked as their descriptions were.

    Raises:
        OperationError: INVALID_ARGUMENT or UNSUPPORTED if the files do not hold the weights.
        StoreError: They cannot be read, or it cannot be written.
    """
    with store.reading(upload_files(upload.upload_id)) as files, preserved_rng():
        request = pb.BeginUploadRequest(kind=upload.kind, base_model=upload.base_model, files=_heads(files, upload))
        if check_upload(pool, shapes, request).lora != upload.lora:
            raise invalid(f"{ADAPTER_CONFIG} is not the one that was described", "path")
        tensors = _adapter_tensors(pool, files, upload) if upload.kind == ADAPTER else _model_tensors(files, upload)
    config = pb.RunConfig(base_model=upload.base_model, from_upload=upload.upload_id)
    if upload.HasField("lora"):
        config.lora.CopyFrom(upload.lora)
    with store.replacing(upload_checkpoint(upload.upload_id)) as folder:
        write_checkpoint(folder, {WEIGHTS: tensors}, run_id=upload.upload_id, name="checkpoint", config=config)


# ---- adapters ----


def _lora_settings(config: Mapping[str, Any], tensors: Iterable[str]) -> pb.LoraSettings:
    """The settings of an ``adapter_config.json``.

    Raises:
        OperationError: UNSUPPORTED for a setting that changes what the adapter computes and that runs do not have.
    """
    if config.get("peft_type") != "LORA":
        raise _unsupported(f"the adapter's peft_type is {config.get('peft_type')!r}; runs train LORA adapters")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise _unsupported(f"the adapter's task_type is {config['task_type']!r}; it must be CAUSAL_LM or absent")
    if config.get("init_lora_weights", True) not in PLAIN_STARTS:
        raise _unsupported(
            f"the adapter was initialised by {config['init_lora_weights']!r}, which changed the base model's weights"
            " too; convert it with peft's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    usual = LoraConfig()
    unknown = {
        name: value
        for name, value in config.items()
        if name not in TAKEN | WITHOUT_EFFECT and value and value != getattr(usual, name, None)
    }
    if unknown:
        listed = ", ".join(f"{name}={json.dumps(value)[:100]}" for name, value in sorted(unknown.items()))
        raise _unsupported(f"the adapter's {ADAPTER_CONFIG} has settings that runs do not have: {listed}")
    rank, alpha = config.get("r", usual.r), config.get("lora_alpha", usual.lora_alpha)
    dropout, targets = config.get("lora_dropout", 0.0), config.get("target_modules")
    if type(rank) is not int or rank < 1:
        raise invalid(f"{ADAPTER_CONFIG}: r is {rank!r}; it is a whole number of at least 1", "path")
    if not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise invalid(f"{ADAPTER_CONFIG}: lora_alpha is {alpha!r}; it is a positive number", "path")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise invalid(f"{ADAPTER_CONFIG}: lora_dropout is {dropout!r}; 0 <= lora_dropout < 1", "path")
    if isinstance(targets, list):
        modules = sorted(str(target) for target in targets)
    elif targets == "all-linear":
        modules = []
    else:  # a regular expression: what it matched is in the file
        modules = sorted({_module(name).rpartition(".")[2] for name in tensors})
    scale = math.sqrt(rank) if config.get("use_rslora") else 1.0
    return pb.LoraSettings(rank=rank, alpha=alpha * scale, dropout=dropout, target_modules=modules)


def _check_adapter(shapes: AdapterShapes, base: str, settings: pb.LoraSettings, tensors: Shapes) -> None:
    strange = [name for name in tensors if not name.startswith(PREFIX)]
    if strange:
        raise invalid(f"the adapter's tensor {strange[0]!r} is not named as peft names them: {PREFIX}...", "path")
    modules = shapes.modules(base)
    uploaded = {name.removeprefix(PREFIX): shape for name, shape in tensors.items() if not name.endswith(BASE_WEIGHT)}
    lacking = sorted({module for name in tensors if (module := _module(name)) not in modules})
    if lacking:
        raise invalid(f"the base model {base!r} has no module {_some(lacking)}, which the adapter changes", "path")
    for target in settings.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in modules):
            raise invalid(
                f"{ADAPTER_CONFIG}: the base model {base!r} has no module {target!r}, a target of the adapter", "path"
            )
    where = ", ".join(settings.target_modules) or "every linear layer"
    _compare(shapes.of(base, settings), uploaded, f"an adapter of rank {settings.rank} on {where} of {base!r}")


def _adapter_tensors(pool: ModelPool, files: Path, upload: pb.Upload) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in upload.files:
        if file.name.endswith(".safetensors"):
            try:
                loaded = load_file(files / file.name)
            except SafetensorError as error:
                raise invalid(f"{file.name} is no file of safetensors: {error}", "path") from error
            if other := next((name for name, tensor in loaded.items() if not tensor.is_floating_point()), ""):
                raise invalid(f"{file.name} has whole numbers as {other!r}; weights are floating-point numbers", "path")
            tensors |= {name.removeprefix(PREFIX): tensor for name, tensor in loaded.items()}
    for name in [name for name in tensors if name.endswith(BASE_WEIGHT)]:
        _check_base_weight(pool, upload.base_model, name.removesuffix(BASE_WEIGHT), tensors.pop(name))
    return tensors


def _check_base_weight(pool: ModelPool, base: str, module: str, weight: Tensor) -> None:
    """Check that a base model's weight within an adapter's file is the base model's, up to the rounding of bfloat16."""
    own: Any = getattr(pool.get(base).model.get_submodule(module), "weight", None)
    if (
        own is None
        or weight.shape != own.shape
        or not torch.allclose(weight.float(), whole(own).float().cpu(), rtol=2**-7, atol=1e-6)
    ):
        raise invalid(
            f"the adapter's file holds a weight of {module!r} that is not that of the base model {base!r}: it was"
            " trained or resized, and an adapter alone does not say so; upload the whole model instead",
            "path",
        )


def _module(tensor: str) -> str:
    """The module that an adapter's tensor changes."""
    return tensor.removeprefix(PREFIX).removesuffix(BASE_WEIGHT).partition(".lora_")[0]


# ---- whole models ----


def _check_model(pool: ModelPool, base: str, config: Mapping[str, Any], uploaded: Shapes) -> None:
    facts = pool.facts(base)
    try:
        model = without_weights(make_configuration(config))
    except ConfigurationError as error:
        raise invalid(f"{MODEL_CONFIG} does not describe a causal LM of transformers: {error}", "path") from error
    if type(model).__name__ != facts.architecture:
        raise invalid(
            f"the folder holds a {type(model).__name__}, and the base model {base!r} is a {facts.architecture}", "path"
        )
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    mine = pool.meta_model(base)
    expected = {name: tuple(parameter.shape) for name, parameter in mine.named_parameters()}
    _compare(expected, shapes, f"the base model {base!r}")
    own, theirs = mine.config.to_dict(), model.config.to_dict()
    for name in sorted((own.keys() | theirs.keys()) - NOT_COMPUTED):
        if own.get(name) != theirs.get(name):
            raise invalid(
                f"{MODEL_CONFIG} says {name}={theirs.get(name)!r}, and the base model {base!r} has {own.get(name)!r}:"
                " the weights would compute something else there",
                "path",
            )
    for name, shape in uploaded.items():
        if shapes.get(name, shape) != shape:
            raise invalid(f"{name!r} is {list(shape)} in the file and {list(shapes[name])} by {MODEL_CONFIG}", "path")


def _model_tensors(files: Path, upload: pb.Upload) -> dict[str, Tensor]:
    """The parameters as transformers loads them, in the precision of the files."""
    heads = [file for file in _heads(files, upload) if file.name.endswith(".safetensors")]
    kinds = {entry["dtype"] for file in heads for entry in _tensors(file).values()}
    dtype = torch.float64 if "F64" in kinds else torch.float32 if "F32" in kinds else "auto"
    try:
        config = AutoConfig.from_pretrained(files, trust_remote_code=False)
        loaded: Any = auto_class(takes_images(config)).from_pretrained(
            files, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise invalid(f"the folder could not be loaded by transformers: {error}", "path") from error
    model, found = loaded
    for problem in ("missing_keys", "unexpected_keys"):
        if names := sorted(found[problem]):
            raise invalid(f"the folder's weights have {problem.replace('_', ' ')}: {_some(names)}", "path")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


# ---- files ----


def _heads(files: Path, upload: pb.Upload) -> Iterable[pb.UploadFile]:
    """Yield the describing bytes of files: headers of safetensors, and whole JSON files.

    Raises:
        OperationError: INVALID_ARGUMENT for a header that is longer than its file, or than safetensors has them.
    """
    for file in upload.files:
        path = files / file.name
        with path.open("rb") as stream:
            size = path.stat().st_size
            if file.name.endswith(".safetensors"):
                size = int.from_bytes(stream.read(8), "little")
                if size > min(path.stat().st_size, MAX_HEADER_BYTES):
                    raise invalid(f"{file.name} says that its header has {size:,} bytes", "path")
            if file.name.endswith((".safetensors", ".json")):
                yield pb.UploadFile(name=file.name, head=stream.read(size))


def _tensors(file: pb.UploadFile) -> dict[str, Any]:
    """Name -> dtype and shape of the tensors of a safetensors file, by its header."""
    entries = {name: entry for name, entry in _json(file).items() if name != "__metadata__"}
    for entry in entries.values():
        if not (isinstance(entry, dict) and isinstance(entry.get("shape"), list) and "dtype" in entry):
            raise invalid(f"{file.name} has no header of safetensors", "path")
    return entries


def _json(file: pb.UploadFile) -> dict[str, Any]:
    try:
        content = json.loads(file.head)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{file.name} is not JSON, or has no header of safetensors: {error}", "path") from error
    if not isinstance(content, dict):
        raise invalid(f"{file.name} holds no JSON object", "path")
    return content


def _compare(expected: Shapes, shapes: Shapes, what: str) -> None:
    """Raise INVALID_ARGUMENT unless names and shapes agree."""
    for problem, names in (("lack", expected.keys() - shapes.keys()), ("also have", shapes.keys() - expected.keys())):
        if names:
            raise invalid(f"the weights are not those of {what}: they {problem} {_some(sorted(names))}", "path")
    wrong = sorted(name for name, shape in expected.items() if shapes[name] != shape)
    if wrong:
        name = wrong[0]
        raise invalid(
            f"the weights are not those of {what}: {name!r} is {list(shapes[name])} and must be {list(expected[name])}"
            + (f"; {len(wrong) - 1} more differ" if len(wrong) > 1 else ""),
            "path",
        )


def _some(names: Sequence[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _unsupported(message: str) -> OperationError:
    return OperationError(pb.ERROR_CODE_UNSUPPORTED, message, field="path")
