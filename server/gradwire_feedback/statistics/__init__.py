"""What the scores say: pure functions on numpy arrays that know neither database nor HTTP."""
