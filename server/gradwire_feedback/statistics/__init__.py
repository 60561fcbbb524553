"""Statistics of scores: pure functions on numpy arrays, independent of database and HTTP."""
