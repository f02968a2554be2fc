"""Experiments with microclip: training recipes, sweeps, the paper's theory and its reproduction.

Uses only the library's public API, and adds the commands `train`, `sweep`, `theory` and
`reproduce` to `microclip`.
"""

__version__ = "0.1.0.dev1"
