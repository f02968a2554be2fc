"""Models sharded with fully_shard, on real ranks: the gradient of one process, in shards."""

import pytest
import torch

from microclip.microbatches import cut

import fsdp_cells
import processes
import properties
import reference
from fsdp_cells import CELLS, concerns, data, domains, network

WORLDS = (pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full))


@pytest.fixture(scope="module", params=WORLDS)
def found(request, tmp_path_factory):
    """What every rank found, by cell."""
    world, names = request.param, processes.selected(request, CELLS)
    folder = tmp_path_factory.mktemp(f"world{world}")
    return processes.run(fsdp_cells.work, world, folder, world, names)


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


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CELLS)
def test_equals_one_process(found, name):
    cell, world = CELLS[name], len(found)
    if not concerns(cell, world):
        pytest.skip("concerns another number of ranks")
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


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory):
    """What both ranks hear of what goes wrong; a hang is a failure."""
    folder = tmp_path_factory.mktemp("mistakes")
    return processes.run(fsdp_cells.mistakes, 2, folder, 2, seconds=20)


def test_faults(mistakes):
    for heard in (each["faults"] for each in mistakes):
        assert "they have [3, 4]" in heard["uneven rank"]
        assert "they have [3, 4], with [6, 8] examples" in heard["uneven world"]
        assert "'fused' does not work on a sharded model" in heard["fused"]
        assert "micro-batches over all ranks are streamed" in heard["median"]
        assert "is for models sharded" in heard["plain"]
        assert "several dimensions" in heard["hsdp"]
        assert "'1.weight' is not sharded" in heard["half"]
        assert "set_gradient_divide_factor() scales" in heard["divided"]
        assert "tensor parallelism is not supported" in heard["parallel"]


MISUSE = {
    "made before": "fully_shard() was called after the Clipper was made",
    "made before, evaluated": "fully_shard() was called after the Clipper was made",
    "half, evaluated": "'unused' is not sharded but others are",
    "frozen, evaluated": "'head.weight' was changed while the parameter was unsharded",
    "own backward rank": "fold() after your own backward",
    "own backward world": "fold() after your own backward",
    "broken off rank": "Call model.reset_iter_state()",
    "broken off world": "Call model.reset_iter_state()",
}


@pytest.mark.parametrize("name", MISUSE)
def test_models_that_are_not_as_the_clipper_found_them(mistakes, name):
    for heard in (each["faults"] for each in mistakes):
        assert MISUSE[name] in heard[name]


@pytest.mark.full
def test_no_gradient_buffer(tmp_path):
    """A second backward pass, but no second gradient: only what FSDP has in flight."""
    for buffer, plain, clipped in processes.run(fsdp_cells.memory, 2, tmp_path, 2):
        assert clipped - plain < 0.75 * buffer


def filled_up(gradients, like):
    return [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, like, strict=True)]


def test_ranks_that_use_different_layers(mistakes):
    """Equal layers, so that nothing but a look shows that gradients are mixed up."""
    found = [each["branches"] for each in mistakes]
    for name, (_, later, _, filled) in fsdp_cells.BRANCHES.items():
        for scope in ("rank", "world"):
            if later[0] != later[1] and not filled:
                for each in found:
                    assert "the ranks use different parts" in each[f"{name}, {scope}"][0], name
                continue
            net = fsdp_cells.Branches("")
            gradients = []
            for rank in range(2):
                net.used = later[rank]
                for rows in (slice(0, 3), slice(3, 6)):
                    x, y = processes.batch(rank, 6, torch.float64)
                    loss = processes.losses(net)((x[rows], y[rows])).mean()
                    each = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
                    gradients.append(filled_up(each, list(net.parameters())))
            if scope == "world":
                gradients = [
                    [(a + b) / 2 for a, b in zip(gradients[j], gradients[j + 2], strict=True)]
                    for j in range(2)
                ]
            wanted = reference.clipped_gradient(
                gradients, [3] * len(gradients), reference.WEIGH["MinNorm()"]
            )[0]
            for each in found:
                message, given = each[f"{name}, {scope}"]
                assert not message
                properties.assert_close(filled_up(given, wanted), wanted, 1e-12)


def test_ranks_that_differ(mistakes):
    for heard in (each["disagreements"] for each in mistakes):
        for scope in ("rank", "world"):
            assert "microbatch_size (rank 0: 2, rank 1: 3)" in heard[f"size {scope}"]
            assert "rule (rank 0: MinNorm(), rank 1: Unit())" in heard[f"rule {scope}"]
            assert "rank 1: frozen or missing" in heard[f"frozen {scope}"]
            assert "they have [3, 0]" in heard[f"nothing {scope}"]
            assert (
                "all ranks must have the same number of micro-batches"
                in heard[f"fewer folds {scope}"]
            )
