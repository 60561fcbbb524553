"""Advice from an estimate: what fits, what to turn on, which batch to use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gradwire_server.config import MAX_RANKS
from gradwire_server.engine.model.layers.activations import Activations
from gradwire_server.engine.sizing.estimate import ENGINE_BYTES, MEMORY_SHARE, Estimate, Workload, fewest_ranks
from gradwire_server.engine.sizing.parts import readable

TREATMENTS = {
    Activations.RECOMPUTE: "recomputes them in the backward pass",
    Activations.OFFLOAD: "copies what is kept to host memory",
    Activations.CHUNK: "computes feed-forward layers in chunks of tokens",
}


def advice(estimate: Estimate) -> list[str]:
    """Sentences about an estimate; the first says whether it fits."""
    return [
        _verdict(estimate),
        *_vllm(estimate),
        *_ranks(estimate),
        *(_batches(estimate) if estimate.fits else _changes(estimate)),
    ]


def _verdict(estimate: Estimate) -> str:
    engine = readable(ENGINE_BYTES[estimate.device.kind])
    needs = f"{readable(max(estimate.total_bytes, estimate.sampling_bytes))} and {engine} for the engine itself"
    room = f"{readable(estimate.usable_bytes)} that can be planned with of {readable(estimate.device.bytes)}"
    return f"It fits: {needs}, of {room}." if estimate.fits else f"It does not fit: {needs}, and there are {room}."


def _vllm(estimate: Estimate) -> Iterator[str]:
    """Describe the memory that vLLM takes beside the training."""
    reserved, weights = estimate.vllm_bytes, estimate.vllm_weight_bytes
    if not reserved:
        return
    yield (
        f"While samples are in progress, vLLM reserves {readable(reserved)} ({MEMORY_SHARE:.0%} of the device); with"
        f" what is held besides, that is {readable(estimate.sampling_bytes)}. While a batch is trained on, it sleeps"
        " and takes nothing of the device"
        + (f", and {readable(weights)} of host memory for its weights." if estimate.workload.lora_rank else ".")
    )
    room = reserved - weights
    if room <= 0:
        yield f"That is less than its copy of the weights, {readable(weights)}: it cannot start on this device."
        return
    tokens = f" of {room // estimate.key_value_token_bytes:,} tokens" if estimate.key_value_token_bytes else ""
    yield f"Of these, {readable(weights)} are its copy of the weights, and the rest is for keys and values{tokens}."


def _ranks(estimate: Estimate) -> Iterator[str]:
    """Describe the effect of several ranks, where they are asked for or help."""
    workload = estimate.workload
    if workload.ranks > 1:
        how = "which divide the weights" if workload.divided else "each with a whole copy of the weights"
        yield f"The figures are of each of {workload.ranks} ranks, {how}."
    if estimate.device.kind == "cuda" and (workload.ranks > 1 or not estimate.fits):
        fewest = fewest_ranks(replace(workload, divided=False), estimate.device, MAX_RANKS)
        if fewest is not None:
            ranks = fewest.workload.ranks
            on = f"from {ranks} such devices on (--ranks {ranks})" if ranks > 1 else "one such device"
            yield f"It fits {on}: {readable(fewest.total_bytes)} on each."


def _batches(estimate: Estimate) -> Iterator[str]:
    workload = estimate.workload
    rows = estimate.microbatch_rows
    yield (
        f"Use batches of any number of rows: the server splits them into micro-batches, here of {rows}"
        f" {'row' if rows == 1 else 'rows'} of {workload.tokens:,} tokens."
    )
    if estimate.chosen and not workload.checkpointing:
        does = " and ".join(TREATMENTS[each] for each in estimate.chosen)
        yield f"The activations of such rows do not fit, so the server {does}."
    yield from _logits(estimate)
    longest = min(longest_row(estimate), estimate.context_length)
    if longest > workload.tokens:
        yield f"A row may have up to about {longest:,} tokens."
    more = more_runs(estimate)
    if more > 0:
        yield f"There is room for {more:,} more such {'run' if more == 1 else 'runs'}."
    if not workload.samples and not workload.vllm:
        yield (
            f"Sampling adds {readable(estimate.key_value_token_bytes * workload.tokens)} for each row of"
            f" {workload.tokens:,} tokens in progress (--samples)."
        )


def _logits(estimate: Estimate) -> Iterator[str]:
    """On a GPU: whether logits are kept, which decides between gigabytes and 12 bytes a token."""
    if estimate.device.kind != "cuda" or estimate.workload.head == "reward":
        return
    every = 4 * estimate.microbatch_rows * (estimate.workload.tokens - 1) * estimate.model.run.policy.facts.vocab_size
    if estimate.parts["logits"] >= every:
        yield f"There is room to keep the logits of such rows for the backward pass: {readable(every)} in float32."
    else:
        yield (
            f"There is no room for the logits of such rows, {readable(every)} in float32, so the server computes them"
            " again in the backward pass."
        )


def longest_row(estimate: Estimate) -> int:
    """Tokens of the longest row that fits, as a micro-batch's bytes are proportional to its tokens."""
    step = sum(estimate.parts[name] for name in ("activations", "images", "logits", "passing"))
    room = estimate.usable_bytes - ENGINE_BYTES[estimate.device.kind] - estimate.total_bytes + step
    return int(estimate.workload.tokens * room / max(1, estimate.row_bytes))


def more_runs(estimate: Estimate) -> int:
    """Number of further runs that fit; negative if there are too many."""
    of_runs = ["adapters", "masters", "gradients", "moments"] + ([] if estimate.workload.lora_rank else ["weights"])
    each = sum(estimate.parts[name] for name in of_runs) // estimate.workload.runs
    return (estimate.usable_bytes - estimate.needed_bytes) // max(1, each)


def _changes(estimate: Estimate) -> Iterator[str]:
    """The first change that makes the workload fit, the smallest changes first."""
    fewer = _with_fewer_runs(estimate)
    if fewer is not None:
        count = fewer.workload.runs
        words = f"{count:,} {'run' if count == 1 else 'runs'} instead of {estimate.workload.runs:,}"
        yield f"It fits with {words}: {readable(fewer.total_bytes)}."
        return
    for words, workload in _alternatives(estimate):
        other = estimate.again(workload)
        if other.fits:
            yield f"It fits with {words}: {readable(other.total_bytes)}."
            return
    yield "No setting makes it fit: take a smaller model, shorter rows, fewer runs or a larger device."


def _with_fewer_runs(estimate: Estimate) -> Estimate | None:
    """Estimate as many runs as fit; None if not one does. With fewer runs the server takes larger micro-batches."""
    other = estimate
    for _ in range(3):
        runs = other.workload.runs + more_runs(other)
        if runs < 1:
            return None
        other = estimate.again(replace(estimate.workload, runs=runs))
        if other.fits:
            return other
    return None


def _alternatives(estimate: Estimate) -> Iterator[tuple[str, Workload]]:
    words, workload = "", estimate.workload
    if not estimate.chosen:
        words, workload = "gradient_checkpointing=True (--checkpointing)", replace(workload, checkpointing=True)
        yield words, workload
    if not workload.lora_rank:
        words, workload = _joined(words, "LoRA (--lora-rank 32)"), replace(workload, lora_rank=32)
        yield words, workload
    if not workload.quantize:
        words, workload = _joined(words, "the base in 4 bits (--quantize nf4)"), replace(workload, quantize="nf4")
        yield words, workload
    while workload.tokens > 512:
        workload = replace(workload, tokens=workload.tokens // 2)
        yield _joined(words, f"rows of {workload.tokens:,} tokens"), workload


def _joined(words: str, more: str) -> str:
    return f"{words} and {more}" if words else more
