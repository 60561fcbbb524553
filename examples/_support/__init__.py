"""What the examples share: a small model, tasks with checkable answers, a report."""
