"""Scores of given tokens under a policy, in bounded memory: the planner of micro-batches, forwards, chunks of logits.

May import: ``model``.
"""
