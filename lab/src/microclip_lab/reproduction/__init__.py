"""The paper's experiments at a small scale, with the controls a reviewer would ask for.

`tasks` (what is trained, and in which ways) -> `study` (which runs come next, given the finished
ones) -> `run_job` (runs one) -> `records` (what each run leaves) -> `effects` and `verdicts` (what
follows, by the `claims` that were written down before) -> `page` and `document`. `command` ties
them together. Imports nothing heavy.
"""
