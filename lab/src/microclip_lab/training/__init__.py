"""Training with micro-batch clipping: vision, speech and language recipes, and your own.

A `Recipe` says what is trained and `Training` how; `train` runs it. Importing this package loads
nothing heavy, so that `microclip train --help` is quick.
"""
