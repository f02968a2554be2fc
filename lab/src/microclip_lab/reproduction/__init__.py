"""The paper's experiments at a small scale, with the controls a reviewer would ask for.

Data flows one way: `tasks` (what is trained) with their `arms` (in which ways) -> `study` (which
runs are to be done, given those that are) -> `carry_out` (does one) -> `records` (what it left) ->
`effects` and `verdicts` (what follows, by the `claims` that were written down before) -> `page` and
`document`. `command` ties the rooms together. Nothing heavy is imported here.
"""
