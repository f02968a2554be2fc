"""Running many training jobs: plans, a shared queue, worker processes and progress.

Knows nothing of what a job trains. `sweep` and `reproduction` are built on it.
"""
