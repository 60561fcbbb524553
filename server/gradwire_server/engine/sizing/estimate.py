"""The memory that a workload takes, from the model's configuration, and whether it fits a device.

The parts are those of an engine that trains: weights, references, what each run holds, and one micro-batch of the size
that the engine would choose on this device. They come on top of an engine that holds no model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.machine import sampling_cache
from gradwire_server.engine.model.layers.activations import Activations
from gradwire_server.engine.model.layers.exact_products import panel_bytes
from gradwire_server.engine.model.loading.quantization import Quantization
from gradwire_server.engine.model.meta_device import DeviceKind
from gradwire_server.engine.scoring.activation_choice import Costs
from gradwire_server.engine.scoring.memory import Memory, MemoryUser, TokenBytes, may_recompute
from gradwire_server.engine.scoring.planner import CHEAP_CUT, Budget
from gradwire_server.engine.sizing.meta_model import MODEL, MetaModel
from gradwire_server.engine.sizing.parts import (
    GRADIENT_BYTES,
    MOMENT_BYTES,
    gathered_bytes,
    key_value_bytes,
    master_bytes,
)

USABLE = 0.9
"""Part of a device's memory that is planned with; the rest is left to fragmentation."""
ENGINE_BYTES = {"cpu": 600 << 20, "cuda": 1 << 30}
"""An engine that holds no model: its libraries, or the context and libraries of CUDA on the device."""
LIBRARY_BYTES = {"cpu": 150 << 20, "cuda": 0}
"""Memory of peft, transformers and torch, loaded with the first model; measured on a CPU, none of it on a GPU."""
MEMORY_SHARE = 0.35
"""Part of a GPU's memory that vLLM reserves for a model's samples, with ``--sampler vllm``, while it is awake."""
SCORES = {"": "logprobs", "value": "values", "reward": "rewards"}


@dataclass(frozen=True)
class Device:
    """The device that the engine computes on.

    Attributes:
        kind: ``"cpu"`` or ``"cuda"``.
    """

    kind: DeviceKind
    bytes: int


@dataclass(frozen=True)
class Workload:
    """The training to estimate.

    Attributes:
        model: Folder, ``config.json`` or hub name.
        lora_rank: Rank of the adapters; 0 trains all weights.
        target_modules: Layers with an adapter, as in a run's settings; all linear ones if empty.
        tokens: Tokens of the longest row.
        rows: Rows of a batch.
        samples: Rows sampled at the same time, of ``tokens`` tokens each.
        head: ``""``, ``"value"`` or ``"reward"``.
        checkpointing: Whether activations are always recomputed in the backward pass, also where they would fit.
        quantize: How the frozen base holds its linear layers; None in ``dtype``.
        references: ``"base"``, or folders, configurations and hub names.
        image_tokens: Number of each row's tokens that are of images.
        shared_tokens: First tokens that all rows have in common, which are computed once in a micro-batch.
        ranks: Number of ranks, each on a device of its own; everything else is of one of them.
        divided: Whether the weights are divided among them.
        vllm: Whether vLLM samples, which sleeps while a batch is trained on.
        deterministic: Whether the runs are deterministic.
    """

    model: str
    lora_rank: int = 32
    tokens: int = 8192
    rows: int = 32
    runs: int = 1
    samples: int = 0
    head: str = ""
    checkpointing: bool = False
    dtype: torch.dtype = torch.bfloat16
    quantize: Quantization | None = None
    references: tuple[str, ...] = ()
    image_tokens: int = 0
    shared_tokens: int = 0
    target_modules: tuple[str, ...] = ()
    ranks: int = 1
    divided: bool = False
    vllm: bool = False
    deterministic: bool = False

    @property
    def run_config(self) -> training_pb2.RunConfig:
        config = training_pb2.RunConfig(base_model=MODEL, head=self.head)
        if self.checkpointing:
            config.gradient_checkpointing = True
        if self.lora_rank:
            config.lora.rank = self.lora_rank
            config.lora.target_modules.extend(self.target_modules)
        return config


@dataclass(frozen=True)
class Estimate:
    """The memory of a workload on a device.

    Attributes:
        context_length: The model's context in tokens.
        trained_parameters: Number of parameters that each run trains.
        parts: Name -> bytes; the names are those of :data:`PARTS`.
        chosen: How the micro-batch's activations are handled.
        microbatch_rows: Rows that go through the model together.
        budget: The engine's limits for an operation.
        key_value_token_bytes: Keys and values of a sampled token.
        model: The model and run that it was computed from.
    """

    workload: Workload
    device: Device
    num_parameters: int
    context_length: int
    trained_parameters: int
    parts: Mapping[str, int]
    chosen: Activations
    microbatch_rows: int
    budget: Budget
    key_value_token_bytes: int
    model: MetaModel = field(repr=False, compare=False)

    @cached_property
    def activations(self) -> Mapping[bool, int]:
        """Bytes of a micro-batch's activations with (True) and without (False) gradient checkpointing."""
        of = {False: Activations.KEEP, True: Activations.RECOMPUTE}
        return {each: int(self._step(self.microbatch_rows, of[each])["activations"]) for each in of}

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a micro-batch of one row that is computed as longer rows are: all but what is held."""
        of_longer = Activations.RECOMPUTE | Activations.CHUNK if may_recompute(self.model.run) else Activations.KEEP
        images = _image_bytes(self.workload, self.model, 1, of_longer)
        return int(sum(self._step(1, of_longer).values())) + images

    def again(self, workload: Workload) -> Estimate:
        """The estimate of another workload on the same device."""
        alike = all(
            getattr(workload, name) == getattr(self.workload, name)
            for name in ("model", "dtype", "run_config", "quantize")
        )
        return estimate(workload, self.device, self.model if alike else None)

    def _step(self, rows: int, activations: Activations) -> Mapping[str, float]:
        return _step_bytes(self.workload, self.model, self.budget, rows, activations)

    @property
    def total_bytes(self) -> int:
        """All parts together, beyond an engine that holds no model."""
        return sum(self.parts.values())

    @property
    def needed_bytes(self) -> int:
        """The total, or what is taken while vLLM samples if that is more, and the engine itself."""
        return max(self.total_bytes, self.sampling_bytes) + ENGINE_BYTES[self.device.kind]

    @property
    def vllm_bytes(self) -> int:
        """Memory that vLLM reserves while it is awake."""
        return int(MEMORY_SHARE * self.device.bytes) if self.workload.vllm else 0

    @property
    def vllm_weight_bytes(self) -> int:
        """The part of :attr:`vllm_bytes` that its copy of the weights takes."""
        return self.num_parameters * self.workload.dtype.itemsize if self.workload.vllm else 0

    @property
    def sampling_bytes(self) -> int:
        """Memory held between operations, with vLLM awake; 0 without vLLM."""
        return sum(held_parts(self.workload, self.model).values()) + self.vllm_bytes if self.workload.vllm else 0

    @property
    def usable_bytes(self) -> int:
        return int(USABLE * self.device.bytes)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.usable_bytes and self.vllm_weight_bytes <= self.vllm_bytes


PARTS = {
    "weights": "the model's weights",
    "panels": "float32 copies of weights that deterministic runs multiply with",
    "references": "reference models",
    "adapters": "adapters and heads, with their float32 masters",
    "masters": "float32 masters of trained weights",
    "gradients": "accumulated gradients",
    "moments": "AdamW's moments",
    "gathered": "layers of divided models that are whole for a moment",
    "activations": "activations of one micro-batch",
    "images": "the vision part on the images of one micro-batch",
    "logits": "logits kept for the backward; those computed again pass",
    "passing": "what a forward and backward need for a moment",
    "key_values": "keys and values of samples in progress",
    "known": "those of known prompts, once they fill the rest of the sampling cache",
    "libraries": "code that is loaded with the first model",
}
"""Name of a part -> what it is."""


def meta_model(workload: Workload, kind: DeviceKind) -> MetaModel:
    """The model and run of a workload, for estimates on devices of this kind."""
    return MetaModel(workload.model, workload.dtype, workload.run_config, workload.quantize, kind)


def estimate(workload: Workload, device: Device, model: MetaModel | None = None) -> Estimate:
    """Compute the memory of a workload.

    Args:
        model: Its :func:`meta_model`, for estimates of one workload on several devices; by default a new one.

    Raises:
        OperationError: UNSUPPORTED if a model is not a causal LM of transformers, or for images that it does not take;
            INVALID_ARGUMENT for LoRA settings.
    """
    model = model or meta_model(workload, device.kind)
    _check(workload, model)
    parts = held_parts(workload, model)
    held = sum(parts.values()) + ENGINE_BYTES[device.kind]
    planned = _Planned(device, model, held)
    budget = planned.budget(model.run, workload.tokens)
    of_row = workload.tokens + math.ceil(budget.image_cost * workload.image_tokens)
    shared = workload.shared_tokens
    most = budget.tree_tokens if shared * CHEAP_CUT > budget.microbatch_tokens else budget.microbatch_tokens
    per_microbatch = max(1, min(workload.rows, (most - shared) // (of_row - shared)))
    chosen = budget.activations(shared + per_microbatch * (of_row - shared))
    step = _step_bytes(workload, model, budget, per_microbatch, chosen)
    parts |= {name: int(count) for name, count in step.items()}
    parts["images"] = _image_bytes(workload, model, per_microbatch, chosen)
    per_token = key_value_bytes(model.model, workload.dtype)
    parts["libraries"] = LIBRARY_BYTES[device.kind]
    if workload.samples and not workload.vllm:
        parts["key_values"] = workload.samples * workload.tokens * per_token
        parts["known"] = max(0, sampling_cache(device.bytes) - parts["key_values"]) if per_token else 0
    return Estimate(
        workload=workload,
        device=device,
        num_parameters=model.num_parameters,
        context_length=model.context_length,
        trained_parameters=model.trained_parameters,
        parts=parts,
        chosen=chosen,
        microbatch_rows=per_microbatch,
        budget=budget,
        key_value_token_bytes=per_token,
        model=model,
    )


def _step_bytes(
    workload: Workload, model: MetaModel, budget: Budget, rows: int, activations: Activations
) -> Mapping[str, float]:
    scores = {SCORES[workload.head]} | ({"logprobs"} if workload.head != "reward" or workload.references else set())
    return model.step(rows, workload.tokens, scores, budget, activations, workload.shared_tokens)


def _image_bytes(workload: Workload, model: MetaModel, rows: int, activations: Activations) -> int:
    recompute = workload.checkpointing or Activations.RECOMPUTE in activations
    return int(rows * workload.image_tokens * model.image_bytes(recompute=recompute))


def _check(workload: Workload, model: MetaModel) -> None:
    if workload.tokens > model.context_length:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"a row of {workload.tokens:,} tokens is longer than the model's context of {model.context_length:,}",
            field="tokens",
        )
    if workload.tokens < 2:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            "a row has at least 2 tokens: each token but the first is scored by those before it",
            field="tokens",
        )
    if workload.shared_tokens >= workload.tokens:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"they are the first tokens of each row, and a row has {workload.tokens:,} with its own",
            field="shared_tokens",
        )
    if workload.image_tokens >= workload.tokens:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"they are among the tokens of a row, and a row has {workload.tokens:,} with those of text",
            field="image_tokens",
        )
    if workload.image_tokens and not model.takes_images:
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED, "images are estimated for models that take them", field="image_tokens"
        )


def held_parts(workload: Workload, model: MetaModel) -> dict[str, int]:
    """Bytes of what is held between operations, by the names of :data:`PARTS`."""
    width, master = workload.dtype.itemsize, master_bytes(workload.dtype)
    trained, runs = model.trained_parameters, workload.runs
    parts = dict.fromkeys(PARTS, 0)
    if workload.lora_rank:
        parts["weights"] = model.weight_bytes
        parts["adapters"] = runs * model.adapter_bytes
    else:
        parts["weights"] = runs * trained * width
        parts["masters"] = runs * trained * master
    if workload.deterministic:
        parts["panels"] = panel_bytes(model.model) * (1 if workload.lora_rank else runs)
        parts["panels"] += runs * model.adapter_panel_bytes
    parts["gradients"] = runs * trained * GRADIENT_BYTES
    parts["moments"] = runs * trained * MOMENT_BYTES
    for reference in workload.references:
        if reference != "base":
            parts["references"] += _reference(reference, workload.dtype).weight_bytes
        elif not workload.lora_rank:  # a run that trains all weights has a copy of its own
            parts["references"] += model.weight_bytes
    if workload.divided:
        trained_whole = () if workload.lora_rank else ("masters", "gradients", "moments")
        for name in ("weights", "references", *trained_whole):
            parts[name] = math.ceil(parts[name] / workload.ranks)
        parts["gathered"] = gathered_bytes(model.model, workload.dtype)
    return parts


def on_ranks(workload: Workload, device: Device, ranks: int, model: MetaModel | None = None) -> Estimate:
    """The memory of each of several ranks, which divide the weights only if a whole copy does not fit.

    Raises:
        OperationError: See :func:`estimate`.
    """
    model = model or meta_model(workload, device.kind)
    found = estimate(replace(workload, ranks=ranks), device, model)
    if ranks == 1 or found.fits or workload.quantize:
        return found
    return estimate(replace(workload, ranks=ranks, divided=True), device, model)


def fewest_ranks(workload: Workload, device: Device, most: int, model: MetaModel | None = None) -> Estimate | None:
    """The memory of each of the fewest ranks, a power of two, on which a workload fits; None for more than ``most``."""
    model, ranks = model or meta_model(workload, device.kind), 1
    while ranks <= most:
        found = on_ranks(workload, device, ranks, model)
        if found.fits:
            return found
        ranks *= 2
    return None


def _reference(path: str, dtype: torch.dtype) -> MetaModel:
    try:
        return MetaModel(path, dtype, training_pb2.RunConfig())
    except OperationError as error:
        message = f"{path}: {str(error.__cause__ or '').partition(chr(10))[0] or error.message}"
        raise OperationError(error.code, message, field="reference") from None


class _Planned(Memory):
    """The engine's plan of micro-batches on a device that need not be here."""

    def __init__(self, device: Device, model: MetaModel, held_bytes: int) -> None:
        super().__init__(torch.device(device.kind), machine_bytes=1 << (device.bytes.bit_length() - 1))
        self._model = model
        self._unused_bytes = max(0, device.bytes - held_bytes) if device.kind == "cuda" else None

    def _measured(self, run: MemoryUser) -> TokenBytes:
        return self._model.token_bytes()

    def _measured_image(self, run: MemoryUser) -> float:
        return self._model.image_bytes(recompute=run.config.gradient_checkpointing)

    def _measured_costs(self, run: MemoryUser) -> Costs:
        # Not known here. A forward is cheaper than copying all activations on every GPU and bus that there are.
        return Costs(forward_s=0.0, copy_rate=1.0)

    def _room(self, run: MemoryUser, free_bytes: int) -> float:
        return super()._room(run, free_bytes) if self._unused_bytes is None else USABLE * self._unused_bytes
