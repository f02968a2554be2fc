"""DistributedDataParallel on real ranks: the gradient of one process with the same micro-batches.

All cells of one number of ranks run in one process group, since starting processes takes long; the
tests then look at what each rank found.
"""

import pytest
import torch

from microclip import Clipper

import ddp_cells
import processes
import properties
from ddp_cells import CELLS, data, domains

WORLDS = (pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full))


@pytest.fixture(scope="module", params=WORLDS)
def found(request, tmp_path_factory):
    """What every rank found, by cell."""
    world, names = request.param, processes.selected(request, CELLS)
    folder = tmp_path_factory.mktemp(f"world{world}")
    return processes.run(ddp_cells.work, world, folder, world, names)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CELLS)
def test_equals_one_process(found, name):
    cell, world = CELLS[name], len(found)
    net = processes.Net(cell.dtype)
    batches = [data(cell, rank) for rank in range(world)]
    if not sum(cell.sizes[:world]) or (cell.bad is not None and cell.bad >= world):
        pytest.skip("concerns more ranks")
    wanted = processes.twin(
        net, batches, cell.b, rule=cell.rule, reduction=cell.reduction,
        domains=[domains(cell, r) for r in range(world)] if cell.domains else None,
    )  # fmt: skip
    tolerance = 1e-5 if cell.dtype == torch.float32 else 1e-12
    for each in found:
        gradients, _ = each[name]
        if cell.hook:  # DistributedDataParallel gives zeros to what it knows to be unused
            pairs = [(g, w) for g, w in zip(gradients, wanted, strict=True) if w is not None]
            properties.assert_close([g for g, _ in pairs], [w for _, w in pairs], tolerance)
        else:
            properties.assert_close(gradients, wanted, tolerance)


def test_all_ranks_get_the_same_bits(found):
    assert found[0]
    for name, (first, _) in found[0].items():
        for other in found[1:]:
            for one, two in zip(first, other[name][0], strict=True):
                assert (one is None and two is None) or torch.equal(one, two), name


def test_per_core_clipping_is_one_process_with_as_many_microbatches(found):
    """The paper's setting: each core's batch is a micro-batch."""
    world = len(found)
    cell = CELLS["stream whole MinNorm()"]
    net = processes.Net(cell.dtype)
    batches = [data(cell, rank) for rank in range(world)]
    together = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    clipper = Clipper(net, len(together[0]) // world, engine="stream")
    outcome = clipper.backward(processes.losses(net), together)
    assert len(outcome) == world
    properties.assert_close(
        found[0]["stream whole MinNorm()"][0], [p.grad for p in net.parameters()], 1e-12
    )


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """What two ranks found in all else."""
    return processes.run(ddp_cells.others, 2, tmp_path_factory.mktemp("others"), 2)


def test_buffers_are_kept_in_step_as_the_wrapper_does(others):
    for each in (each["statistics"] for each in others):
        for plain, clipped in zip(each[False], each[True], strict=True):
            torch.testing.assert_close(plain, clipped)


def test_a_rank_without_examples_gets_the_buffers_too(others):
    """It takes part in the broadcast; if it did not, the others would wait for it."""
    first, second = (each["idle"] for each in others)
    assert first[0].abs().max() > 0  # the running mean
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_faults_reach_all_ranks_alike(others):
    first, second = (each["faults"] for each in others)
    assert "micro-batch 1 of rank 1 is not finite" in first["nonfinite"]
    assert "micro-batch 1, examples 2, 3, has norm" in second["nonfinite"]
    for each in (first, second):
        assert "OutOfStepError" in each["step"]
        assert "rank 0: step 5, rank 1: step 6" in each["step"]
        assert "no_sync" in each["fold"]
        assert each["propagated"]
        net = processes.Net(torch.float64)
        batches = [processes.batch(rank, 6, torch.float64) for rank in range(2)]
        properties.assert_close(each["own backward"], processes.twin(net, batches, None), 1e-12)


def test_as_on_an_accelerator(others):
    """Without a look at what the others said; a missed step is noticed one step later."""
    world, sizes = 2, (6, 3)
    batches = [processes.batch(rank, sizes[rank], torch.float64) for rank in range(world)]
    net = processes.Net(torch.float64)
    wanted = processes.twin(net, batches, 2)
    domains = [ddp_cells.unread_domains(size) for size in sizes]
    wanted_of_domains = processes.twin(net, batches, 2, domains=domains)
    alone = [batches[0], tuple(part[:0] for part in batches[1])]
    wanted_of_first = processes.twin(net, alone, 2, domains=domains)
    for gradients, of_domains, of_first, message in (each["unread"] for each in others):
        properties.assert_close(of_first, wanted_of_first, 1e-12)
        properties.assert_close(gradients, wanted, 1e-12)
        properties.assert_close(of_domains, wanted_of_domains, 1e-12)
        assert "rank 0: step 5, rank 1: step 6" in message
