"""TRL's trainers on two real ranks: equal to one process that has the micro-batches of both."""

import pytest
import torch

from microclip import rules

import processes
import properties
import reference
import trl_rank_cells
import trl_runs

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return processes.run(trl_rank_cells.every, 2, folder, 2, str(folder))


@pytest.mark.parametrize("name", trl_rank_cells.CELLS)
def test_two_ranks_equal_one_process(ranks, name):
    stack, size, b, _, options = trl_rank_cells.CELLS[name]
    clip = {"microbatch_size": b, "rule": rules.MinNorm()}
    run = trl_runs.trainer(
        stack, trl_runs.model("llama", stack), clip=clip, per_device_train_batch_size=size
    )
    (ids, found, tokens), (other_ids, other, _) = ranks[0][name], ranks[1][name]
    assert len(ids) == len(other_ids) == len(found) == 2
    for step, (mine, theirs) in enumerate(zip(ids, other_ids, strict=True)):
        pieces = [[i - 100 for i in piece] for piece in (*mine, *theirs)]
        gradients = trl_runs.gradients(run, pieces)
        sizes = [len(piece) for piece in pieces]
        if options.get("loss_mean") == "step":
            labels = [
                sum(x != -100 for row in piece for x in run.train_dataset[row]["labels"][1:])
                for piece in pieces
            ]
            scales = [
                n * sum(sizes) / (s * sum(labels)) for n, s in zip(labels, sizes, strict=True)
            ]
            gradients = [
                [None if g is None else scale * g for g in gradient]
                for scale, gradient in zip(scales, gradients, strict=True)
            ]
        twin = reference.clipped_gradient(gradients, sizes, reference.WEIGH["MinNorm()"])[0]
        properties.assert_close(found[step], twin, 1e-5)
        for one, same in zip(found[step], other[step], strict=True):
            assert (one is None and same is None) or torch.equal(one, same)
    assert tokens[-1] > tokens[0] > 0
