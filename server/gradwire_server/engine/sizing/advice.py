"""What an estimate means for its reader: what fits, what to turn on, which batch to use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gradwire_server.config import MAX_RANKS
from gradwire_server.engine.model.layers.activations import Activations
from gradwire_server.engine.sizing.estimate import ENGINE_BYTES, Estimate, Workload, fewest_ranks
from gradwire_server.engine.sizing.parts import readable

TREATMENTS = {
    Activations.RECOMPUTE: "recomputes them in the backward pass",
    Activations.OFFLOAD: "copies what is kept to host memory",
    Activations.CHUNK: "computes feed-forward layers in chunks of tokens",
}


def advice(found: Estimate) -> list[str]:
    """Sentences about an estimate; the first says whether it fits."""
    return [_verdict(found), *_ranks(found), *(_batches(found) if found.fits else _changes(found))]


def _verdict(found: Estimate) -> str:
    engine = readable(ENGINE_BYTES[found.device.kind])
    needs = f"{readable(found.total_bytes)} and {engine} for the engine itself"
    room = f"{readable(found.usable_bytes)} that can be planned with of {readable(found.device.bytes)}"
    return f"It fits: {needs}, of {room}." if found.fits else f"It does not fit: {needs}, and there are {room}."


def _ranks(found: Estimate) -> Iterator[str]:
    """What several ranks mean, where they are asked for or help."""
    workload = found.workload
    if workload.ranks > 1:
        how = "which divide the weights" if workload.divided else "each with a whole copy of the weights"
        yield f"The figures are of each of {workload.ranks} ranks, {how}."
    if found.device.kind == "cuda" and (workload.ranks > 1 or not found.fits):
        fewest = fewest_ranks(replace(workload, divided=False), found.device, MAX_RANKS)
        if fewest is not None:
            ranks = fewest.workload.ranks
            on = f"from {ranks} such devices on (--ranks {ranks})" if ranks > 1 else "one such device"
            yield f"It fits {on}: {readable(fewest.total_bytes)} on each."


def _batches(found: Estimate) -> Iterator[str]:
    workload = found.workload
    rows = found.microbatch_rows
    yield (
        f"Use batches of any number of rows: the server splits them into micro-batches, here of {rows}"
        f" {'row' if rows == 1 else 'rows'} of {workload.tokens:,} tokens."
    )
    if found.chosen and not workload.checkpointing:
        does = " and ".join(TREATMENTS[each] for each in found.chosen)
        yield f"The activations of such rows do not fit, so the server {does}."
    yield from _logits(found)
    longest = min(longest_row(found), found.context_length)
    if longest > workload.tokens:
        yield f"A row may have up to about {longest:,} tokens."
    more = more_runs(found)
    if more > 0:
        yield f"There is room for {more:,} more such {'run' if more == 1 else 'runs'}."
    if not workload.samples:
        yield (
            f"Sampling adds {readable(found.key_value_token_bytes * workload.tokens)} for each row of"
            f" {workload.tokens:,} tokens in progress (--samples)."
        )


def _logits(found: Estimate) -> Iterator[str]:
    """On a GPU: whether logits are kept, which decides between gigabytes and 12 bytes a token."""
    if found.device.kind != "cuda" or found.workload.head == "reward":
        return
    every = 4 * found.microbatch_rows * (found.workload.tokens - 1) * found.model.run.policy.facts.vocab_size
    if found.parts["logits"] >= every:
        yield f"There is room to keep the logits of such rows for the backward pass: {readable(every)} in float32."
    else:
        yield (
            f"There is no room for the logits of such rows, {readable(every)} in float32, so the server computes them"
            " again in the backward pass."
        )


def longest_row(found: Estimate) -> int:
    """Tokens of the longest row that fits, as a micro-batch's bytes are proportional to its tokens."""
    step = sum(found.parts[name] for name in ("activations", "images", "logits", "passing"))
    room = found.usable_bytes - found.needed_bytes + step
    return int(found.workload.tokens * room / max(1, found.row_bytes))


def more_runs(found: Estimate) -> int:
    """Number of further runs that fit; negative if there are too many."""
    of_runs = ["adapters", "masters", "gradients", "moments"] + ([] if found.workload.lora_rank else ["weights"])
    each = sum(found.parts[name] for name in of_runs) // found.workload.runs
    return (found.usable_bytes - found.needed_bytes) // max(1, each)


def _changes(found: Estimate) -> Iterator[str]:
    """The first change that makes the workload fit, the smallest changes first."""
    fewer = _with_fewer_runs(found)
    if fewer is not None:
        count = fewer.workload.runs
        words = f"{count:,} {'run' if count == 1 else 'runs'} instead of {found.workload.runs:,}"
        yield f"It fits with {words}: {readable(fewer.total_bytes)}."
        return
    for words, workload in _alternatives(found):
        other = found.again(workload)
        if other.fits:
            yield f"It fits with {words}: {readable(other.total_bytes)}."
            return
    yield "No setting makes it fit: take a smaller model, shorter rows, fewer runs or a larger device."


def _with_fewer_runs(found: Estimate) -> Estimate | None:
    """As many runs as fit, or None if not even one does; with fewer runs the server takes larger micro-batches."""
    other = found
    for _ in range(3):
        runs = other.workload.runs + more_runs(other)
        if runs < 1:
            return None
        other = found.again(replace(found.workload, runs=runs))
        if other.fits:
            return other
    return None


def _alternatives(found: Estimate) -> Iterator[tuple[str, Workload]]:
    words, workload = "", found.workload
    if not found.chosen:
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
