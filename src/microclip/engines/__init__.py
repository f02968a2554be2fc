"""Engines: how the norms of micro-batches and the weighted gradient are computed.

An engine never changes the result, only its cost. It is made for one step, takes micro-batches
with `fold` and returns the gradient with `finish`. Engines know other ranks only through the norms
in `step_record`, and import nothing from `microclip.distributed`.
"""
