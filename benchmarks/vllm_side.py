"""vLLM's side of a comparison, in vLLM's own environment: a line of JSON asks for samples, one of JSON answers.

Started by ``benchmarks.against_vllm``. ``{"prompts": [[…]], "n": 1, "tokens": 128, "adapter": "FOLDER"}`` is answered
by ``seconds``, ``cpu_seconds``, ``tokens`` (of the first prompt) and ``gib`` of resident memory.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import psutil
import vllm
from vllm.lora.request import LoRARequest


def main() -> None:
    plan: dict[str, Any] = json.loads(sys.argv[1])
    engine = vllm.LLM(
        plan["model"],
        dtype="float32",
        max_model_len=2048,
        skip_tokenizer_init=True,
        enable_lora=plan["lora"],
        max_lora_rank=8,
        enable_prefix_caching=plan["prefix_caching"],
    )
    for line in sys.stdin:
        asked = json.loads(line)
        if not asked:  # whether it is ready
            print("{}", flush=True)
            continue
        sampling = vllm.SamplingParams(
            n=asked["n"], max_tokens=asked["tokens"], temperature=asked["temperature"], ignore_eos=True,
            detokenize=False,
        )  # fmt: skip
        adapter = LoRARequest("adapter", 1, asked["adapter"]) if asked.get("adapter") else None
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        wall, cpu = time.perf_counter(), time.process_time()
        answers = engine.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
        answer = {
            "seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
            "tokens": list(answers[0].outputs[0].token_ids),
            "gib": psutil.Process().memory_info().rss / 2**30,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
