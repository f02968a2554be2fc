"""transformers, Accelerate and Lightning on two real ranks equal one process with all examples."""

import re

import pytest
import torch

import processes
import properties
import stack_cells as cells

pytestmark = pytest.mark.full

WORLD = 2
TOLERANCE = {"no": 1e-5, "bf16": 0.05, "32-true": 1e-5, "bf16-mixed": 0.05}

ACCELERATE = [  # batch size, batches per step, b, precision, scope if sharded
    *[(4, 1, 2, "no", ""), (2, 2, None, "no", ""), (3, 2, 2, "no", ""), (4, 1, 2, "bf16", "")],
    *[(4, 1, 2, "no", scope) for scope in ("rank", "world")],
    *[(2, 2, 2, "no", scope) for scope in ("rank", "world")],
    (2, 2, 2, "no", "sync_each_batch"),
]
REFUSED = {
    (4, 1, 2, "no", "unprepared"): "2 processes, but Sequential is neither wrapped in Distributed",
    (4, 1, 2, "no", "unwrapped"): "Pass AcceleratedClipper what accelerator.prepare.model. returns",
    (4, 1, 2, "no", "join"): "Inside accelerator.join_uneven_inputs, .* even_batches=True",
}
TRANSFORMERS = [  # batch size, batches per step, b, whether bf16
    *[(4, 1, 2, False), (2, 2, None, False), (2, 2, 4, False), (2, 2, 3, False), (4, 1, 2, True)],
]
LIGHTNING = [  # batches per step, precision, batch size, b, a row to skip
    *[(1, "32-true", 2, None, -1), (2, "32-true", 2, None, -1), (2, "bf16-mixed", 2, None, -1)],
    *[(1, "32-true", 4, 2, -1), (2, "32-true", 4, 3, -1), (1, "bf16-mixed", 4, 2, -1)],
    *[(1, "32-true", 4, 2, 0), (2, "32-true", 4, 1, 21)],
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return what the ranks found in a case; ranks are started once per integration."""
    found = {}

    def of(train, case, cases, *more):
        if train not in found:
            folder = tmp_path_factory.mktemp(train.__name__)
            given = [(*(str(folder) for _ in more), *case) for case in cases]
            ranks = processes.run(cells.each, WORLD, folder, train, WORLD, given)
            found[train] = dict(zip(cases, zip(*ranks, strict=True), strict=True))
        return found[train][case]

    return of


def assert_steps_equal_the_reference(found, steps, wanted, tolerance):
    """`found`: per rank, the rows and gradient of each step; `wanted`: a gradient from rows."""
    assert [len(steps_of_rank) for steps_of_rank in found] == [steps] * WORLD
    for step in zip(*found, strict=True):
        first, *others = [gradients for _, gradients in step]
        properties.assert_close(first, wanted([rows for rows, _ in step]), tolerance)
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def wanted_of(model, b):
    def batch_of(rows):
        x, y = cells.features()
        return x[rows], y[rows]

    return lambda rows: cells.expected(model, lambda x: cells.loss(model, x), batch_of, rows, b)


def over_ranks(rows, b):
    """Return micro-batches made of the same slice of every rank's batch."""
    return [
        [row for part in parts for row in part[start : start + b]]
        for parts in zip(*rows, strict=True)
        for start in range(0, len(parts[0]), b)
    ]


@pytest.mark.parametrize("case", ACCELERATE, ids=str)
def test_accelerate(results, case):
    """Within a window Accelerate turns FSDP's reduction off; the clipper turns it on again."""
    size, times, b, precision, scope = case
    found = results(cells.accelerate, case, [*ACCELERATE, *REFUSED])
    wanted = wanted_of(cells.network(), b)
    if scope == "world":
        whole = wanted_of(cells.network(), None)
        wanted = lambda rows: whole([over_ranks(rows, b)])  # noqa: E731
    steps = -(-cells.COUNT // (WORLD * size * times))
    assert_steps_equal_the_reference(found, steps, wanted, TOLERANCE[precision])


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_accelerate_refuses_loops_whose_ranks_would_diverge_or_hang(results, case):
    for [(_, [message])] in results(cells.accelerate, case, [*ACCELERATE, *REFUSED]):
        assert re.search(REFUSED[case], message)


@pytest.mark.parametrize("case", LIGHTNING, ids=str)
def test_lightning(results, case):
    times, precision, size, *_ = case
    found = results(cells.lightning, case, LIGHTNING, "folder")
    steps = -(-cells.COUNT // (WORLD * size * times))
    wanted = wanted_of(cells.network(), None)
    assert_steps_equal_the_reference(found, steps, wanted, TOLERANCE[precision])


@pytest.mark.parametrize("case", TRANSFORMERS, ids=str)
def test_transformers(results, case):
    size, times, b, bf16 = case
    found = results(cells.transformers, case, TRANSFORMERS, "folder")
    model, data = cells.bert().train(), cells.sentences()

    def sentences(rows):
        return {key: torch.stack([data[i][key] for i in rows]) for key in ("input_ids", "labels")}

    def wanted(rows):
        wide = b is not None and b > size
        return cells.expected(model, lambda x: model(**x).loss, sentences, rows, b, wide)

    steps = -(-cells.COUNT // (WORLD * size * times))
    assert_steps_equal_the_reference(found, steps, wanted, 0.05 if bf16 else 1e-5)
