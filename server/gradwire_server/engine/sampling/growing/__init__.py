"""The work for each token of a sample besides drawing it: text, stop strings, streaming."""
