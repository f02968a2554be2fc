"""Random networks of layers, indices, sorts, masks and routes: exact or refused."""

from functools import partial

import pytest
from torch.utils.checkpoint import checkpoint

import fuzzer

# the rest of the 5,000 is run by hand: python tests/support/fuzzer.py --count 5000
SEEDS = range(240)


@pytest.mark.sample(4)
@pytest.mark.parametrize("first", SEEDS[::20])
@pytest.mark.parametrize("b", [1, 3])
def test_exact_or_refused(first, b):
    said = {seed: fuzzer.check(seed, "fused", b) for seed in range(first, first + 20)}
    assert {s: v for s, v in said.items() if not v.startswith(("exact", "refused"))} == {}
    assert any(verdict == "exact (fused)" for verdict in said.values())


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("first", SEEDS[::20])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_change_nothing(first, use_reentrant):
    """Every module is a checkpointed segment, and so are those inside of it."""
    segment = partial(checkpoint, use_reentrant=use_reentrant)
    said = {s: fuzzer.check(s, "fused", 1 + s % 3, segment) for s in range(first, first + 20)}
    assert {s: v for s, v in said.items() if not v.startswith(("exact", "refused"))} == {}
    assert any(verdict == "exact (fused)" for verdict in said.values())


@pytest.mark.sample(4)
@pytest.mark.parametrize("first", SEEDS[:60:15])
def test_auto_follows_batches_that_drift(first):
    """One clipper over six batches with different lengths, routes and branches."""
    said = {seed: fuzzer.drift(seed, "auto", 1) for seed in range(first, first + 15)}
    assert {seed: v for seed, v in said.items() if not v.startswith("exact")} == {}
