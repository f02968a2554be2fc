"""Which micro-batch size, and why: looking at the per-example gradients of one moment."""
