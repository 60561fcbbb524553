"""Training on a GPU: tokens per second and model-FLOPs utilisation, against a padded loop, TRL, and TRL with Liger.

    python -m benchmarks.gpu [--only 4B:lora:service …] [--minutes 9.5] [--results out/gpu.json] [--fresh] [--smoke]
    python -m benchmarks.gpu --ranks 8

Qwen3-shaped models with random weights. For 0.6, 4 and 8 B parameters everything that the service does with one
(:mod:`benchmarks.gpu_service`): LoRA, full and NF4 at rows of 4,096 and 16,384 tokens, sampling, 64 runs at once,
checkpoints, an engine's death, and the training step's time by part beside the roofline's. For 0.6 and 1.7 B training
on rows of 128 to 4,096 tokens beside other trainers. First the rate of a bfloat16 matrix product is measured on the
same device: utilisation is the arithmetic that the rows need over what that rate would do in the same time. Each case
is a process of its own; its result is written at once, and a case with a result is not run again, so that an
interrupted run can be continued. Nothing is read from the network.

The other trainers get the largest number of rows that fits into memory, with gradient accumulation; TRL and Liger where
they import (or in the environment whose Python GRADWIRE_TRL_PYTHON names). Without a GPU only ``--smoke`` runs:
everything on the CPU at tiny shapes.

``--ranks 8`` trains on 1, 2, 4 and 8 GPUs instead, and shows the tokens a second of each GPU over those of one. What
needs more GPUs than there are is not measured, and the table says so. To compare: NeMo Automodel's table has LoRA on
Llama 3 8B, rows of 4,096 tokens, on one H100 at 12,473 tokens/s (402 TFLOP/s, 41 % of its peak), and Qwen2.5 32B on 16
GPUs at 92 % of the rate of 8."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import ROOT, machine
from benchmarks.gpu_cases import SIDES, TRAINERS, Case, run_case
from benchmarks.qwen import SCALED, SIZES
from benchmarks.report import show
from benchmarks.roofline import PARTS
from benchmarks.step_parts import IDLE, UNPROFILED

CASES = [
    *(Case(size, "lora", "service") for size in ("4B", "8B", "0.6B")),
    *(Case(size, "full", "service") for size in ("0.6B", "4B", "8B")),
    Case("8B", "nf4", "service"),
    *(Case(size, "lora", "vllm") for size in ("4B", "0.6B")),
    *(Case(size, tuning, side) for size in SIZES for tuning in ("lora", "full") for side in TRAINERS),
]
CASE_LIMIT_S = 280.0
NOT_MEASURED = "not measured"
TARGET_UTILISATION, TARGET_TRL = 0.45, 2.0


def matrix_rate(device: str, *, smoke: bool) -> float:
    """Measure the operations per second of a large bfloat16 matrix product of random numbers, the median of ten."""
    width = 256 if smoke else 8192
    left, right = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(13):
        machine.wait_for(device)
        start = time.perf_counter()
        left @ right
        machine.wait_for(device)
        seconds.append(time.perf_counter() - start)
    return 2.0 * width**3 / sorted(seconds[3:])[5]


def in_child(case: Case, models: Path, *, smoke: bool) -> dict[str, Any]:
    """Run a case in a child process; return its result, or ``{"error": …}``.

    What it started ends with it, and all ends if this process does: the next case needs the whole GPU.
    """
    words = [sys.executable, "-m", "benchmarks.gpu", "--case", str(case), "--models", str(models)]
    read, write = os.pipe()  # the child reads until this process is gone
    child = subprocess.Popen(
        words + ["--smoke"] * smoke, cwd=ROOT, stdin=read, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    why = ""
    try:
        out, err = child.communicate(timeout=CASE_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        why = f"took more than {CASE_LIMIT_S:g} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        os.close(read)
        os.close(write)
    found = next((json.loads(line) for line in reversed(out.splitlines()) if line.startswith("{")), {})
    if "parts" in found and (why or child.returncode):
        found["parts"]["the rest"] = {"error": why or (err.strip() or f"exit status {child.returncode}")[-300:]}
    return found or {"error": why or (err.strip() or f"exit status {child.returncode}")[-1500:]}


def end_with_parent() -> None:
    """End this process and what it started when the one that started it is gone."""

    def wait() -> None:
        os.read(0, 1)  # not sys.stdin, which a daemon thread must not hold at the exit
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def results_so_far(path: Path, device: str, *, smoke: bool, fresh: bool) -> dict[str, Any]:
    """What earlier runs on this device have measured.

    Raises:
        ValueError: The file has no results, or those of another device.
    """
    began = {"device": device, "smoke": smoke, "cases": {}}
    if fresh or not path.exists():
        return began
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} has no results ({error}): name another file with --results, or --fresh") from None
    if (found.get("device"), found.get("smoke", False)) != (device, smoke):
        whose = f"{found.get('device')}{', --smoke' if found.get('smoke') else ''}"
        raise ValueError(f"{path} has results of {whose}: name another file with --results, or forget them by --fresh")
    return found


def save(path: Path, results: dict[str, Any]) -> None:
    """Write the results; whoever is interrupted meanwhile keeps the old ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(path)


def missing(case: Case) -> str:
    """Return the missing package that a case needs; empty if it can run."""
    if "GRADWIRE_TRL_PYTHON" in os.environ and case.side.startswith("trl"):
        return ""  # it is to be found there
    return next((name for name in SIDES.get(case.side, ()) if importlib.util.find_spec(name) is None), "")


def on_ranks(most: int) -> list[Case]:
    """The cases of ``--ranks``: 1, 2, 4 and so on, the fewest first."""
    counts = [1 << power for power in range(most.bit_length())]
    return [Case(size, tuning, f"ours@{ranks}") for size in SCALED for tuning in ("lora", "full") for ranks in counts]


def efficiency(rates: Sequence[tuple[int, dict[str, Any]]]) -> dict[int, float]:
    """Tokens per second and rank, over those of the fewest ranks.

    Args:
        rates: Number of ranks and result of a case, the fewest first.
    """
    measured = [(ranks, found["tokens_per_second"]) for ranks, found in rates if "tokens_per_second" in found]
    return {ranks: rate / ranks * measured[0][0] / measured[0][1] for ranks, rate in measured}


def scaling_table(results: dict[str, Any], cases: list[Case]) -> Table:
    """Build the table of the results on several ranks."""
    rate, by_case = results["matrix_rate"], results["cases"]
    out = Table(title=results["device"])
    for name in ("model", "tuning", "GPUs", "tokens/s", "utilisation", "efficiency"):
        out.add_column(name)
    for case in cases:
        own = by_case.get(str(case), {"error": NOT_MEASURED})
        cells = [case.size, case.tuning, str(case.ranks)]
        if "error" in own:
            out.add_row(*cells, own["error"].splitlines()[-1][:80])
            continue
        alike = [each for each in cases if (each.size, each.tuning) == (case.size, case.tuning)]
        part = efficiency([(each.ranks, by_case.get(str(each), {})) for each in alike])[case.ranks]
        used = own["flops_per_second"] / (rate * case.ranks)
        out.add_row(*cells, f"{own['tokens_per_second']:,.0f}", f"{used:.1%}", f"{part:.0%}")
    return out


def table(results: dict[str, Any]) -> Table:
    """Build the table of the results so far."""
    rate = results["matrix_rate"]
    out = Table(title=f"{results['device']}: bfloat16 matrix product {rate / 1e12:,.1f} TFLOP/s")
    for name in ("model", "tuning", "side", "tokens/s", "utilisation", "ours is", "rows at a time", "peak GiB"):
        out.add_column(name)
    cases = results["cases"]
    for case in CASES:
        result = cases.get(str(case))
        if result is None or "parts" in result:
            continue
        place = (case.size, case.tuning, case.side)
        if "error" in result:
            out.add_row(*place, result["error"].splitlines()[-1][:60])
            continue
        ours = cases.get(str(Case(case.size, case.tuning, "ours")), {}).get("tokens_per_second")
        ratio = f"{ours / result['tokens_per_second']:.2f} x" if ours and case.side != "ours" else ""
        out.add_row(
            *place, f"{result['tokens_per_second']:,.0f}", f"{result['flops_per_second'] / rate:.1%}", ratio,
            str(result.get("rows_at_a_time", "")), show(result.get("peak_gib", 0.0)),
        )  # fmt: skip
    return out


def service_table(results: dict[str, Any]) -> Table:
    """Build the table of the parts of the service so far."""
    out = Table(title="the service")
    for name in ("model", "tuning", "side", "part", "measured", "wanted", "utilisation"):
        out.add_column(name)
    for case in CASES:
        for part, found in results["cases"].get(str(case), {}).get("parts", {}).items():
            values = dict(found) if isinstance(found, dict) else {"s": found}
            wanted, flops = values.pop("target", None), values.pop("flops/s", None)
            said = ", ".join(f"{name} {each if isinstance(each, str) else show(each)}" for name, each in values.items())
            used = f"{flops / results['matrix_rate']:.1%}" if flops else ""
            out.add_row(case.size, case.tuning, case.side, part, said, f"{wanted:,.0f}" if wanted else "", used)
    return out


def steps_table(results: dict[str, Any]) -> Table:
    """Build the table of the time of a training step by part, each above the roofline's.

    The step is measured without the profiler, the rest with it.
    """
    out = Table(title="ms of a training step on the device", box=box.SIMPLE, padding=0, pad_edge=False)
    for name in ("", *PARTS, IDLE, "step"):
        out.add_column(name, justify="right" if name else "left")
    for case in CASES:
        for title, step in results["cases"].get(str(case), {}).get("steps", {}).items():
            measured, least = step["measured"], step["least"] or {}
            cells = [f"{measured[part]:,.1f}" for part in (*PARTS, IDLE, UNPROFILED)]
            out.add_row(f"{case.size} {case.tuning} {title}", *cells)
            if least:
                cells = [f"{least[part]:,.1f}" for part in PARTS]
                out.add_row("  at least", *cells, "", f"{sum(least.values()):,.1f}")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="SIZE[:TUNING[:SIDE]]")
    parser.add_argument("--ranks", type=int, default=0, metavar="N", help="ours, on 1, 2, 4 … N GPUs")
    parser.add_argument("--minutes", type=float, default=9.5, help="cases not begun by then are left for the next run")
    parser.add_argument("--results", type=Path, default=ROOT / "out/gpu.json")
    parser.add_argument("--models", type=Path, default=Path("/tmp/gradwire-benchmark-models"), help="made once")
    parser.add_argument("--fresh", action="store_true", help="forget the results that are there")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on a CPU too; the figures mean nothing")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.case:
        end_with_parent()
        print(json.dumps(run_case(Case.of(args.case), args.models, device, smoke=args.smoke)))
        return 0
    if device == "cpu" and not args.smoke and not args.ranks:
        parser.error("there is no CUDA device; --smoke runs everything at tiny shapes on the CPU")

    began, console = time.monotonic(), Console()
    gpus, cases = torch.cuda.device_count(), on_ranks(args.ranks) if args.ranks else CASES
    chosen = [case for case in cases if not args.only or any(str(case).startswith(prefix) for prefix in args.only)]
    if not chosen:
        parser.error(f"--only {args.only[0]} is none of {', '.join(map(str, cases))}")
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    try:
        results = results_so_far(args.results, name, smoke=args.smoke, fresh=args.fresh)
    except ValueError as error:
        parser.error(str(error))
    results["machine"] = machine.describe()
    results["matrix_rate"] = matrix_rate(device, smoke=args.smoke) if gpus or args.smoke else 0.0
    left = []
    for case in chosen:
        if {"tokens_per_second", "parts"} & {*results["cases"].get(str(case), {})}:
            continue
        if args.ranks and case.ranks > gpus and not args.smoke:
            results["cases"][str(case)] = {"error": f"{NOT_MEASURED}: {case.ranks} GPUs needed, {gpus} here"}
        elif package := missing(case):
            results["cases"][str(case)] = {"error": f"{package} is not installed"}
        elif time.monotonic() - began > args.minutes * 60 - CASE_LIMIT_S / 3:
            left.append(str(case))
            continue
        else:
            results["cases"][str(case)] = in_child(case, args.models, smoke=args.smoke)
        save(args.results, results)
        console.print(f"{case}: {json.dumps(results['cases'][str(case)])[:300]}", markup=False)
    of_one_gpu = [service_table(results), steps_table(results), table(results)]
    for each in [scaling_table(results, cases)] if args.ranks else of_one_gpu:
        console.print(each)
    console.print(machine.in_words(results["machine"]))
    if left:
        console.print(f"left for the next run: {', '.join(left)}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
