"""LoRA: the adapters of runs, the layers that apply them, and the products these are made of."""
