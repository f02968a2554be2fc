import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test reaches for a network

import pytest
import torch


@pytest.fixture(autouse=True)
def _calm():
    """One thread each (two test processes share two cores), a known seed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
