"""Adaptive micro-batch clipping for PyTorch: train better on data that is not clean."""

from microclip import rules
from microclip.clipper import Clipper
from microclip.outcome import Outcome

__version__ = "0.1.0.dev0"
__all__ = ["Clipper", "Outcome", "rules"]
