"""Recipes: speech, vision and language models trained with micro-batch clipping, and your own.

A recipe says what is trained (`Recipe`); how is said by `Training`; `train` does it. This package
imports nothing heavy by itself: `microclip train --help` is to be quick.
"""
