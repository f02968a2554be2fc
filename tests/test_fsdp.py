"""Models sharded with fully_shard, on real ranks: the gradient of one process, in shards."""

import pytest
import torch

from microclip.microbatches import cut

import fsdp_cells
import processes
import properties
from fsdp_cells import CELLS, data, domains, network

WORLDS = (1, 2, 4)


@pytest.fixture(scope="module", params=WORLDS)
def found(request, tmp_path_factory):
    """What every rank found, by cell."""
    world = request.param
    return processes.run(fsdp_cells.work, world, tmp_path_factory.mktemp(f"world{world}"), world)


def batches_of(cell, world):
    """What one process would be given: micro-batches over all ranks are put together."""
    local = [data(cell, rank) for rank in range(world)]
    if cell.scope == "rank":
        return local, cell.b
    pieces = [cut(batch, cell.b) for batch in local]
    together = [
        tuple(torch.cat([piece.batch[i] for piece in row]) for i in range(2))
        for row in zip(*pieces, strict=True)
    ]
    return together, None


@pytest.mark.parametrize("name", CELLS)
def test_equals_one_process(found, name):
    cell, world = CELLS[name], len(found)
    if cell.bad is not None and cell.bad >= world:
        pytest.skip("concerns more ranks")
    batches, b = batches_of(cell, world)
    net = network(cell)
    wanted = processes.twin(
        net, batches, b, rule=cell.rule, domains=[domains(cell)] * world if cell.domains else None
    )
    if cell.reduction == "sum":  # as many times the mean as there are micro-batches
        wanted = [
            None if g is None else g * (3 * (world if cell.scope == "rank" else 1)) for g in wanted
        ]
    tolerance = 0.05 if cell.half else 1e-12 if cell.dtype == torch.float64 else 1e-5
    for each in found:
        once, twice, _ = each[name]
        for gradient, value in zip(once, wanted, strict=True):
            # what FSDP knows to be unused may have zeros
            assert value is not None or gradient is None or not gradient.any()
        pairs = [(g, w) for g, w in zip(once, wanted, strict=True) if w is not None]
        properties.assert_close([g for g, _ in pairs], [w for _, w in pairs], tolerance)
        pairs = [(g, w) for g, w in zip(twice, wanted, strict=True) if w is not None]
        properties.assert_close([g for g, _ in pairs], [2 * w for _, w in pairs], tolerance)


def test_faults(tmp_path):
    for heard in processes.run(fsdp_cells.faults, 2, tmp_path, 2):
        assert "they have [3, 4]" in heard["uneven rank"]
        assert "they have [3, 4], with [6, 8] examples" in heard["uneven world"]
        assert "'fused' does not work on a sharded model" in heard["fused"]
        assert "micro-batches over all ranks are streamed" in heard["median"]
        assert "is for models sharded" in heard["plain"]
        assert "several dimensions" in heard["hsdp"]
        assert "'1.weight' is not sharded" in heard["half"]
        assert "set_gradient_divide_factor() changes" in heard["divided"]
        assert "tensor parallelism is not supported" in heard["parallel"]


def test_no_gradient_buffer(tmp_path):
    """A second backward pass, but no second gradient: only what FSDP has in flight."""
    for buffer, plain, clipped in processes.run(fsdp_cells.memory, 2, tmp_path, 2):
        assert clipped - plain < 0.75 * buffer
