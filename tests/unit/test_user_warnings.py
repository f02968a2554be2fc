"""Warnings point at the line that the user wrote."""

import warnings

import pytest
import torch
from torch import nn

from microclip import Clipper
from microclip.user_warnings import warn


def test_of_a_step_that_skips_a_micro_batch():
    model, x = nn.Linear(2, 1), torch.ones(4, 2)
    x[0] = torch.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clipper = Clipper(model, 1, engine="fused", nonfinite="skip")
        clipper.backward(lambda x: model(x).mean(1), x)
    (warning,) = caught
    assert "Skipped 1 of 4" in str(warning.message)
    assert warning.filename == __file__


def test_called_from_here():
    with pytest.warns(RuntimeWarning, match="odd") as caught:
        warn("odd")
    assert caught[0].filename == __file__
