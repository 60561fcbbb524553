"""The interface of samplers, and its implementations: on the engine's weights, and vLLM."""
