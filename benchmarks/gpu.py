"""Training on a GPU: tokens per second and model-FLOPs utilisation, against a padded loop, TRL, and TRL with Liger.

    python -m benchmarks.gpu [--only 0.6B:lora …] [--minutes 9.5] [--results out/gpu.json] [--fresh] [--smoke]

Qwen3-shaped models of 0.6 B and 1.7 B parameters with random weights, rows of 128 to 4,096 tokens, LoRA and full
fine-tuning. First the rate of a bfloat16 matrix product is measured on the same device: utilisation is the arithmetic
that the rows need over what that rate would do in the same time. Each case is a process of its own; its result is
written at once, and a case with a result is not run again, so that an interrupted run can be continued. Nothing is read
from the network.

The other trainers get the largest number of rows that fits into memory, with gradient accumulation; TRL and Liger where
they import (or in the environment whose Python GRADWIRE_TRL_PYTHON names). Without a GPU only ``--smoke`` runs:
everything on the CPU at tiny shapes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import ROOT, machine
from benchmarks.gpu_cases import SIDES, Case, run_case
from benchmarks.qwen import SIZES
from benchmarks.report import show

CASES = [Case(size, tuning, side) for size in SIZES for tuning in ("lora", "full") for side in SIDES]
CASE_LIMIT_S = 170.0
TARGET_UTILISATION, TARGET_TRL = 0.45, 2.0


def matrix_rate(device: str, *, smoke: bool) -> float:
    """Measure the operations per second of a large bfloat16 matrix product of random numbers, the median of ten."""
    width = 256 if smoke else 8192
    left, right = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(13):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        left @ right
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2.0 * width**3 / sorted(seconds[3:])[5]


def in_child(case: Case, models: Path, *, smoke: bool) -> dict[str, Any]:
    """Run a case in a child process; return its result, or ``{"error": …}``."""
    words = [sys.executable, "-m", "benchmarks.gpu", "--case", str(case), "--models", str(models)]
    try:
        done = subprocess.run(
            words + ["--smoke"] * smoke, cwd=ROOT, capture_output=True, text=True, timeout=CASE_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {CASE_LIMIT_S:g} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    return {"error": (done.stderr.strip() or f"exit status {done.returncode}")[-1500:]}


def missing(case: Case) -> str:
    """Return the missing package that a case needs; empty if it can run."""
    if "GRADWIRE_TRL_PYTHON" in os.environ and case.side.startswith("trl"):
        return ""  # it is to be found there
    return next((name for name in SIDES[case.side] if importlib.util.find_spec(name) is None), "")


def table(results: dict[str, Any]) -> Table:
    """Build the table of the results so far."""
    rate = results["matrix_rate"]
    out = Table(title=f"{results['device']}: bfloat16 matrix product {rate / 1e12:,.1f} TFLOP/s")
    for name in ("model", "tuning", "side", "tokens/s", "utilisation", "ours is", "rows at a time", "peak GiB"):
        out.add_column(name)
    cases = results["cases"]
    for case in CASES:
        found = cases.get(str(case))
        if found is None:
            continue
        place = (case.size, case.tuning, case.side)
        if "error" in found:
            out.add_row(*place, found["error"].splitlines()[-1][:60])
            continue
        ours = cases.get(str(Case(case.size, case.tuning, "ours")), {}).get("tokens_per_second")
        ratio = f"{ours / found['tokens_per_second']:.2f} x" if ours and case.side != "ours" else ""
        out.add_row(
            *place, f"{found['tokens_per_second']:,.0f}", f"{found['flops_per_second'] / rate:.1%}", ratio,
            str(found.get("rows_at_a_time", "")), show(found.get("peak_gib", 0.0)),
        )  # fmt: skip
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="SIZE[:TUNING[:SIDE]]")
    parser.add_argument("--minutes", type=float, default=9.5, help="cases not begun by then are left for the next run")
    parser.add_argument("--results", type=Path, default=ROOT / "out/gpu.json")
    parser.add_argument("--models", type=Path, default=Path("/tmp/gradwire-benchmark-models"), help="made once")
    parser.add_argument("--fresh", action="store_true", help="forget the results that are there")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on a CPU too; the figures mean nothing")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.case:
        print(json.dumps(run_case(Case.of(args.case), args.models, device, smoke=args.smoke)))
        return 0
    if device == "cpu" and not args.smoke:
        parser.error("there is no CUDA device; --smoke runs everything at tiny shapes on the CPU")

    began, console = time.monotonic(), Console()
    results: dict[str, Any] = {"cases": {}}
    if args.results.exists() and not args.fresh:
        results = json.loads(args.results.read_text())
    results["machine"] = machine.describe()
    results["device"] = torch.cuda.get_device_name() if device == "cuda" else "CPU (smoke)"
    results["matrix_rate"] = matrix_rate(device, smoke=args.smoke)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    left = []
    for case in CASES:
        wanted = not args.only or any(str(case).startswith(prefix) for prefix in args.only)
        if not wanted or "tokens_per_second" in results["cases"].get(str(case), {}):
            continue
        if package := missing(case):
            results["cases"][str(case)] = {"error": f"{package} is not installed"}
        elif time.monotonic() - began > args.minutes * 60 - CASE_LIMIT_S / 3:
            left.append(str(case))
            continue
        else:
            results["cases"][str(case)] = in_child(case, args.models, smoke=args.smoke)
        args.results.write_text(json.dumps(results, indent=1) + "\n")
        console.print(f"{case}: {json.dumps(results['cases'][str(case)])[:300]}", markup=False)
    console.print(table(results))
    console.print(machine.in_words(results["machine"]))
    if left:
        console.print(f"left for the next run: {', '.join(left)}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
