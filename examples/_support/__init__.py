"""Helpers of the examples: a small model, tasks with checkable answers, a report."""
