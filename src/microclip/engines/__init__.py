"""Engines: how the micro-batch norms and the weighted gradient are obtained.

An engine never changes the result, only its price. It is made for one step, takes micro-batches
with `fold`, and gives the gradient with `finish`; it knows nothing of who reads the outcome.
"""
