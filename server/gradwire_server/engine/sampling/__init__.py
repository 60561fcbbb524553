"""Generation: the interface of a sampler, the one that shares the engine's weights, and vLLM.

May import: ``state`` (exports), ``scoring``, ``model``.
"""
