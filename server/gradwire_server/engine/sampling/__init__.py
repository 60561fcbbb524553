"""Generation of samples: the sampler interface, the local sampler on the engine's weights, and vLLM.

May import: ``state`` (exports), ``scoring``, ``model``.
"""
