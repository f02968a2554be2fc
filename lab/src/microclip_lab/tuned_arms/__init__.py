"""Arms that are tuned alike, then compared on paired seeds: jobs, records, the search, the workers.

What `dirty_data` and `evidence` share. Knows nothing about tasks, data or how an arm trains.
"""
