"""The loop of every training, on rows, rewards or ratings: steps, evaluations, checkpoints, logs, resume."""
