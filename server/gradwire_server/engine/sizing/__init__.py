"""Memory computed from a model's configuration, without its weights: sizes of tensors, and a step on meta tensors.

May import: ``training``, ``scoring``, ``model`` and the single files of ``engine``.
"""
