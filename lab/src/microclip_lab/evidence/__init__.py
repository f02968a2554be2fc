"""Evidence that decides: does clipping help, where, and how can one tell beforehand?

A plan that was committed before its runs: tasks have to pass a gate, margins are relative, and
seeds are added in blocks until an interval decides. Stands on `microclip_lab.dirty_data`.
"""
