"""Models and their parts: loading, where tensors live, trunk and heads, adapters, packing, attention, tokenizers.

May import: ``errors`` and the other single files of ``engine``.
"""
