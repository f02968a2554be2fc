"""Sweeps and races: which rule, micro-batch size and learning rate, by training them all.

Data flows one way: `config` -> `grid` or `race` (plans: which `job`s are to be done, given those
that are) -> `register` (who does which: Optuna trials in a `storage` that workers share) ->
`worker` (does them; `pruning` ends the hopeless) -> `summary` and `podium` (what came out) ->
`table`. `crew` is how many workers share any plan and `fleet` starts them, `command` ties the rooms
together. Nothing heavy is imported here.
"""
