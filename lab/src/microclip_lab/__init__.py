"""The laboratory of microclip: training recipes, sweeps, the paper's theory and its reproduction.

It uses the library's public surface only, and adds commands to `microclip`.
"""

__version__ = "0.1.0.dev1"
