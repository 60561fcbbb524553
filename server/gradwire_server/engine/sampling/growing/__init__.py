"""What a sample needs for each of its tokens besides drawing it: text, stop strings, streaming."""
