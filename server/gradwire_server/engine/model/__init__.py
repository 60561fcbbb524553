"""Models and their parts: loading, trunk and output head, other heads, adapters, packing, attention, tokenizers.

May import: ``errors`` and the other single files of ``engine``.
"""
