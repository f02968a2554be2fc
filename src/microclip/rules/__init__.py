"""Rules: the weight of each micro-batch, or of each example.

- `norms`: rules that weight micro-batches by the norms of their gradients, as the paper does.
- `examples`: rules that weight examples by what is known about them before the backward pass.
- `history`: rules of the second kind that remember every example.
- `example_table`: what they keep their records in.
"""

from microclip.rules.example_table import ExampleTable
from microclip.rules.examples import ExampleRule, LossWeight, Seen
from microclip.rules.history import LossHistory, NormHistory
from microclip.rules.norms import (
    NONFINITE,
    Automatic,
    Fixed,
    Keep,
    Mean,
    Median,
    MinNorm,
    Nonfinite,
    Quantile,
    Rule,
    Unit,
    Weighting,
    apply,
    check_agreement,
    countable,
    factors,
    maximum,
    minimum,
    quantile,
)
from microclip.rules.parse import KNOWN, parse_rule

__all__ = [
    "KNOWN",
    "NONFINITE",
    "Automatic",
    "ExampleRule",
    "ExampleTable",
    "Fixed",
    "Keep",
    "LossHistory",
    "LossWeight",
    "Mean",
    "Median",
    "MinNorm",
    "Nonfinite",
    "NormHistory",
    "Quantile",
    "Rule",
    "Seen",
    "Unit",
    "Weighting",
    "apply",
    "check_agreement",
    "countable",
    "factors",
    "maximum",
    "minimum",
    "parse_rule",
    "quantile",
]
