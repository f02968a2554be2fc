"""Sweeps and races: which rule, micro-batch size and learning rate works best, by training them.

`config` -> `grid` or `race` (plans: which jobs to run, given the finished ones) -> `worker` (runs
them; `pruning` stops hopeless ones) -> `summary` or `race_report` (results) -> `table`. `command`
ties them together; queue and workers are in `microclip_lab.jobs`. Imports nothing heavy.
"""
