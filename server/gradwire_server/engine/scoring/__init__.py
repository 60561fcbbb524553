"""Scores of given tokens under a policy, in bounded memory: micro-batch planner, forwards, chunks of logits.

May import: ``model``.
"""
