"""Inference: one protocol, and backends over the run's own sampler, local models and endpoints."""

from gradwire.rl.generation import (
    Generation,
    InferenceModule,
    SamplingParams,
    ServiceCodec,
    TextCodec,
    TokenizerCodec,
    TopLogits,
)
from gradwire.rl.inference.local import LocalInference
from gradwire.rl.inference.openai import OpenAIInference, OpenAIOptions
from gradwire.rl.inference.server import RunInference
from gradwire.rl.inference.vllm import VLLMInference

__all__ = [
    "Generation",
    "InferenceModule",
    "LocalInference",
    "OpenAIInference",
    "OpenAIOptions",
    "RunInference",
    "SamplingParams",
    "ServiceCodec",
    "TextCodec",
    "TokenizerCodec",
    "TopLogits",
    "VLLMInference",
]
