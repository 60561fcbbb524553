"""The choice of one token: adjusted logits, grammars, drawing."""
