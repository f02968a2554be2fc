"""Rules that weight examples on two real ranks, in all three stacks: equal to one process."""

import pytest
import torch

import memory_cells
import processes
import properties
import reference
import stack_cells as cells
from example_weights import weight_of, weighted_mean

pytestmark = pytest.mark.full

STACKS = ("accelerate", "lightning", "transformers")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return processes.run(memory_cells.every, 2, folder, 2, str(folder))


def gradient_of(stack, rows):
    """Return sum w_i g_i / sum w_i, example by example."""
    if stack == "transformers":
        model, data = cells.bert().train(), cells.sentences()

        def loss(row):
            return model(data[row]["input_ids"][None], labels=data[row]["labels"][None]).loss
    else:
        model, (x, y) = cells.network(), cells.features()

        def loss(row):
            return memory_cells.losses(model, (x[row : row + 1], y[row : row + 1]))

    each = reference.microbatch_gradients(loss, list(model.parameters()), rows)
    return weighted_mean(each, list(map(weight_of, rows)))


@pytest.mark.parametrize("stack", STACKS)
def test_two_ranks_equal_one_process(ranks, stack):
    steps, keys, lengths = zip(*[found[stack] for found in ranks], strict=True)
    assert len(steps[0]) == len(steps[1]) == 2
    for number, both in enumerate(zip(*steps, strict=True)):
        rows = [row for parts, _ in both for part in parts for row in part]
        assert len(rows) >= 6
        (_, one), (_, other) = both
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        properties.assert_close(one, gradient_of(stack, rows), 1e-5)
        for shown in keys:  # every rank sees the examples of both
            assert shown[number] == sorted(rows)
    assert lengths[0] == (None if stack == "accelerate" else 2)
