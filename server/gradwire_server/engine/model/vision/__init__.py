"""Images: how a model's processor reads them, and where their tokens are in a sequence."""
