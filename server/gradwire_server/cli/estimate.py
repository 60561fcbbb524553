"""``gradwire estimate``: the memory of a training, from the model's configuration alone.

It runs in a process of its own, so it may use torch, which the server's front may not.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from gradwire_server.cli.preflight import model_fault
from gradwire_server.cli.saying import fail

if TYPE_CHECKING:
    from gradwire_server.engine.sizing.estimate import Device, Estimate

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(soft_wrap=True, highlight=False)

TOKENS, RANK = 8192, 32
UNITS = {"mib": 1 << 20, "gib": 1 << 30, "mb": 10**6, "gb": 10**9}
BYTES = (1 << 20, 1 << 50)
"""Least and most memory of a device."""
MOST = 2**31 - 1
"""Most of what is counted by rows, runs, samples and ranks."""
DEVICE = re.compile(r"(?:(cpu|cuda|gpu)\s*)?(?:([0-9]+(?:[.][0-9]+)?)\s*(mib|gib|mb|gb))?", re.IGNORECASE)


@app.command()
def estimate(
    model: Annotated[str, typer.Option(help="Hugging Face name, folder or config.json; no weights are read.")],
    lora_rank: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Rank of each run's adapter; 32 when absent.")
    ] = None,
    target_module: Annotated[
        list[str] | None, typer.Option(help="A layer with an adapter, as in target_modules; repeat for more.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Train all weights instead of an adapter.")] = False,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the longest row; 8,192, or the model's context, when absent.")
    ] = None,
    image_tokens: Annotated[int, typer.Option(min=0, help="Those of the row's tokens that are of images.")] = 0,
    shared_tokens: Annotated[
        int, typer.Option(min=0, help="First tokens that all rows have in common, as those of one prompt.")
    ] = 0,
    rows: Annotated[int, typer.Option(min=1, max=MOST, help="Rows of a batch.")] = 32,
    runs: Annotated[int, typer.Option(min=1, max=MOST, help="Runs on the model at the same time.")] = 1,
    samples: Annotated[int, typer.Option(min=0, max=MOST, help="Rows sampled at the same time.")] = 0,
    sampler: Annotated[
        Literal["local", "vllm"], typer.Option(help="What generates, as of `gradwire serve`; vLLM on a GPU.")
    ] = "local",
    head: Annotated[Literal["value", "reward"] | None, typer.Option(help="A head beside the output head.")] = None,
    reference: Annotated[
        list[str] | None, typer.Option(help='"base", or a model as for --model; repeat for more.')
    ] = None,
    quantize: Annotated[
        Literal["nf4", "int8"] | None, typer.Option(help="Hold the frozen base in 4 or 8 bits.")
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="With create_run(gradient_checkpointing=True).")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float64"] | None,
        typer.Option(help="Of the weights; bfloat16 on a GPU and float32 on a CPU when absent."),
    ] = None,
    device: Annotated[
        str, typer.Option(help='Memory of a GPU ("80 GiB"), or "cpu", "cpu 16 GiB"; this machine when absent.')
    ] = "",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="With create_run(deterministic=True), on a CPU.")
    ] = False,
    ranks: Annotated[
        int, typer.Option(min=1, max=64, help="Ranks, each on such a device: a power of two, as of `gradwire serve`.")
    ] = 1,
    engines: Annotated[
        int, typer.Option(min=1, max=MOST, help="Engines over which runs and samples are spread, with such ranks each.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print bytes by part and total_bytes as JSON.")] = False,
) -> None:
    """Compute what a training takes in memory, whether it fits a device, and what to turn on if not.

    Nothing is downloaded but the model's configuration. The total comes on top of an engine that holds no model.
    """
    references = tuple(reference or ())
    for flag, path in [("--model", model), *(("--reference", each) for each in references if each != "base")]:
        if not Path(path).is_file() and (fault := model_fault(path)):
            fail(f"{flag} {path}: {fault}")
    if ranks & (ranks - 1):
        fail(f"--ranks {ranks}: the work is divided in halves; give a power of two")
    if full and quantize:
        fail("--full trains all weights, and weights held in 4 or 8 bits cannot be trained: leave one of them out")
    for flag, given in (("--lora-rank", lora_rank), ("--target-module", target_module)):
        if full and given:
            fail(f"--full trains all weights, and {flag} is of an adapter: leave one of them out")
    try:
        import torch

        from gradwire_server.engine.errors import OperationError
        from gradwire_server.engine.sizing.advice import advice
        from gradwire_server.engine.sizing.estimate import Workload, meta_model, on_ranks
    except ModuleNotFoundError as missing:
        fail(f"`gradwire estimate` needs {missing.name}, which is not installed: pip install 'gradwire[server]'")
    where = _device(device)
    if sampler == "vllm" and (where.kind == "cpu" or ranks > 1 or quantize):
        fail("--sampler vllm is estimated for one GPU without --quantize and --ranks, as in --device '80 GiB'")
    if sampler == "vllm" and samples:
        fail("--samples: vLLM reserves the same memory whatever is sampled; leave it out with --sampler vllm")
    if deterministic and (where.kind != "cpu" or quantize or dtype == "float64"):
        fail("--deterministic is of a CPU, in float32 or bfloat16 and without --quantize, as in --device 'cpu 16 GiB'")
    default = "float32" if where.kind == "cpu" else "bfloat16"
    try:
        workload = Workload(
            model=model,
            lora_rank=0 if full else lora_rank or RANK,
            target_modules=tuple(target_module or ()),
            tokens=tokens or TOKENS,
            rows=rows,
            runs=-(-runs // engines),
            samples=-(-samples // engines),
            head=head or "",
            checkpointing=checkpointing,
            dtype=getattr(torch, dtype or default),
            quantize=quantize,
            references=references,
            image_tokens=image_tokens,
            shared_tokens=shared_tokens,
            vllm=sampler == "vllm",
            deterministic=deterministic,
        )
        with _quiet():
            sizes = meta_model(workload, where.kind)
            if tokens is None:
                workload = replace(workload, tokens=min(TOKENS, sizes.context_length))
            estimated = on_ranks(workload, where, ranks, sizes)
            sentences = advice(estimated)
    except OperationError as error:
        layers = f"--target-module {' '.join(target_module)}" if target_module else f"--model {model}"
        flags = {
            "tokens": f"--tokens {tokens}:" if tokens else f"--model {model}:",
            "image_tokens": f"--image-tokens {image_tokens}:",
            "shared_tokens": f"--shared-tokens {shared_tokens}:",
            "reference": "--reference",  # of several, the message names the one
            "lora": f"{layers}:",
            "lora.target_modules": f"{layers}:",
        }
        flag = flags.get(error.field or "", f"--model {model}:")
        fail(f"{flag} {str(error.__cause__ or '').partition(chr(10))[0] or error.message}")
    if as_json:
        print(json.dumps({"engines": engines, **_document(estimated, sentences)}, indent=2))
    else:
        if engines > 1:
            console.print(f"Each of {engines} engines, which has {estimated.workload.runs} of the {runs} runs at most:")
        _show(estimated, sentences)
    raise typer.Exit(0 if estimated.fits else 1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what other packages say about their own future, and what the server logs when it loads a model."""
    loggers = [logging.getLogger(name) for name in ("transformers", "bitsandbytes", "gradwire_server")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _device(text: str) -> Device:
    from gradwire_server.engine.machine import machine_memory
    from gradwire_server.engine.sizing.estimate import Device

    match = DEVICE.fullmatch(text.strip())
    if match is None or (text and not text.strip()):
        fail(f'--device {text}: give the memory of a GPU ("80 GiB"), "cpu" or "cpu 16 GiB"')
    kind, amount, unit = match.groups()
    on_cpu = (kind or "").lower() == "cpu"
    if amount:
        count = float(amount) * UNITS[unit.lower()]
        if not BYTES[0] <= count <= BYTES[1]:
            shown = text if len(text) <= 40 else f"{text[:40]}…"
            fail(f"--device {shown}: the memory of a device is between 1 MiB and 1,048,576 GiB")
        return Device("cpu" if on_cpu else "cuda", int(count))
    import torch

    if not on_cpu and torch.cuda.is_available():
        return Device("cuda", torch.cuda.mem_get_info()[1])
    if kind and not on_cpu:
        fail(f'--device {text}: torch finds no GPU here; give the memory of one, as in --device "80 GiB"')
    return Device("cpu", machine_memory())


def _document(estimate: Estimate, sentences: list[str]) -> dict[str, object]:
    return {
        "model": estimate.workload.model,
        "parameters": estimate.num_parameters,
        "trained_parameters": estimate.trained_parameters,
        "device": estimate.device.kind,
        "device_bytes": estimate.device.bytes,
        "dtype": str(estimate.workload.dtype).removeprefix("torch."),
        "bytes": dict(estimate.parts),
        "total_bytes": estimate.total_bytes,
        "needed_bytes": estimate.needed_bytes,
        "usable_bytes": estimate.usable_bytes,
        "fits": estimate.fits,
        "runs": estimate.workload.runs,
        "ranks": estimate.workload.ranks,
        "divided": estimate.workload.divided,
        "activations": estimate.chosen.label,
        "activation_bytes": {
            "checkpointing": estimate.activations[True],
            "no_checkpointing": estimate.activations[False],
        },
        "microbatch_rows": estimate.microbatch_rows,
        "key_value_bytes_per_token": estimate.key_value_token_bytes,
        "vllm_bytes": estimate.vllm_bytes,
        "vllm_weight_bytes": estimate.vllm_weight_bytes,
        "sampling_bytes": estimate.sampling_bytes,
        "advice": sentences,
    }


def _show(estimate: Estimate, sentences: list[str]) -> None:
    from gradwire_server.engine.sizing.estimate import PARTS
    from gradwire_server.engine.sizing.parts import readable

    trained = f"{estimate.trained_parameters:,} trained"
    table = Table(
        title=f"{estimate.workload.model}: {estimate.num_parameters:,} parameters, {trained}", title_justify="left"
    )
    table.add_column("part")
    table.add_column("memory", justify="right")
    for name, count in estimate.parts.items():
        if count:
            table.add_row(PARTS[name], readable(count))
    table.add_section()
    table.add_row("total, beyond an engine that holds no model", readable(estimate.total_bytes))
    console.print(table)
    kept, recomputed = estimate.activations[False], estimate.activations[True]
    console.print(
        f"Activations: {readable(kept)} kept, or {readable(recomputed)} with gradient checkpointing.", markup=False
    )
    for sentence in sentences:
        console.print(sentence, markup=False)
