"""Keys and values of the samples in progress, in pages that rows with a common beginning share."""
