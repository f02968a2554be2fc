"""What all tests share, and which of them the default run leaves to `make test-all`."""

import gc
import os
import sys
from collections import Counter

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test reaches for a network

import pytest
import torch


@pytest.fixture(autouse=True)
def _calm():
    """One thread each (two test processes share two cores), a known seed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    state = sys.modules.get("accelerate.state")
    if state is not None:  # settings of the first Accelerator in a process hold for all later ones
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect no garbage among millions of tests and modules while they come to be."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        keep_what_is_alive()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """After each file: the libraries that it imported stay as well."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        keep_what_is_alive()


def keep_what_is_alive():
    """Leave all objects out of later garbage collections: Trainers ask for several each."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Extensions complain of objects that the interpreter does not collect at its end."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items):
    """Of a matrix marked `sample(n)`, leave all but every n-th case to the full run.

    Tests that share a fixture of their module run in one worker, so that it is made once.
    """
    seen = Counter()
    for item in items:
        fixtures = getattr(item, "_fixtureinfo", None)
        shared = fixtures.name2fixturedefs.values() if fixtures else ()
        if any(found[-1].scope in ("module", "class") for found in shared):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
        mark = item.get_closest_marker("sample")
        if mark is None:
            continue
        matrix = item.nodeid.partition("[")[0]
        if seen[matrix] % mark.args[0]:
            item.add_marker(pytest.mark.full)
        seen[matrix] += 1
