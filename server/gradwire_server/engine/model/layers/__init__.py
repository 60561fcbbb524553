"""Single layers, and what surrounds them in a forward: embeddings, feed-forward chunks, routers, heads, dropout."""
