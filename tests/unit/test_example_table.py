"""The table that rules remember examples in: any ids, in any order, in little memory."""

import pytest
import torch

from microclip.rules import ExampleTable
from microclip.rules.example_table import FREE, GAPS, keys_of


def filled(ids, batch=7, times=1):
    """Add ids batch by batch; each row holds its key and how often it was seen."""
    table = ExampleTable(key=torch.int64)
    for _ in range(times):
        for keys in torch.tensor(ids).split(batch):
            rows = table.add(keys)
            table["key"][rows] = keys
    return table


IDS = {
    "dense": list(range(500)),
    "shuffled": torch.randperm(500, generator=torch.Generator().manual_seed(0)).tolist(),
    "negative": list(range(-250, 250)),
    "huge": [10**15 + 7 * i for i in range(500)],
    "both ends": [2**63 - 1, -(2**63), *range(100)],
    "dense, then huge": [*range(300), *(10**12 + i for i in range(200))],
    "huge, then dense": [10**12, *range(300)],
}


@pytest.mark.parametrize("ids", IDS)
def test_compact(ids):
    """Rows stay, later ones are added as before."""
    ids = IDS[ids]
    table = filled(ids[:-5], times=2)
    before, known = table.find(torch.tensor(ids)), table.known()
    table.compact()
    assert torch.equal(table.find(torch.tensor(ids)), before)
    assert torch.equal(table.known(), known)
    assert len(table["key"]) == int(known.max()) + 1
    rows = table.add(torch.tensor(ids))
    table["key"][rows] = torch.tensor(ids)
    assert torch.equal(table["key"][table.find(torch.tensor(ids))], torch.tensor(ids))
    assert sorted(set(table["visits"][rows].tolist())) == [1, 3]
    empty = ExampleTable()
    empty.compact()
    assert len(empty) == 0


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_finds_what_was_added(ids, batch):
    ids = IDS[ids]
    table = filled(ids, batch, times=2)
    keys = torch.tensor(ids)
    rows = table.find(keys)
    assert len(table) == len(ids)
    assert torch.equal(table["key"][rows], keys)
    assert set(table["visits"][rows].tolist()) == {2}
    assert sorted(table.keys().tolist()) == sorted(ids)
    assert torch.equal(table["key"][table.known()], table.keys())
    unknown = torch.tensor([501, -10_000, 10**17])
    assert table.find(unknown).tolist() == [-1, -1, -1]


@pytest.mark.parametrize("ids", IDS)
def test_state_comes_back(ids):
    table = filled(IDS[ids])
    other = ExampleTable(key=torch.int64)
    other.load_state_dict(table.state_dict())
    keys = torch.tensor(IDS[ids])
    for name in ("key", "visits"):
        assert torch.equal(other[name][other.find(keys)], table[name][table.find(keys)])
    one, two = table.state_dict(), other.state_dict()
    assert (one["keys"] is None) == (two["keys"] is None)
    order, twin_order = (
        torch.arange(len(table)) if s["keys"] is None else s["keys"].argsort() for s in (one, two)
    )
    for name in one["columns"]:
        assert torch.equal(one["columns"][name][order], two["columns"][name][twin_order])


def test_many_scattered_keys_are_sorted_in():
    generator = torch.Generator().manual_seed(1)
    keys = torch.randint(-(2**62), 2**62, (30_000,), generator=generator).unique()
    keys = keys[torch.randperm(len(keys), generator=generator)]
    table = ExampleTable(key=torch.int64)
    for some in keys.split(256):
        rows = table.add(some)
        table["key"][rows] = some
    assert torch.equal(table["key"][table.find(keys)], keys)
    assert table.find(keys + 1).max() == -1
    per_example = table.nbytes / len(keys)
    assert per_example < 1.25 * (9 + 12) + 30  # columns and index, and what is kept aside


def test_an_index_is_dropped_when_the_gaps_are_filled():
    """The first batches of a large shuffled data set look scattered."""
    count = GAPS * 4000 + FREE
    order = torch.randperm(count, generator=torch.Generator().manual_seed(2))
    table = ExampleTable(key=torch.int64)
    for keys in order[:20_000].split(1000):
        rows = table.add(keys)
        table["key"][rows] = keys
    assert torch.equal(table.find(order[:20_000]), order[:20_000])
    assert torch.equal(table["key"][order[:20_000]], order[:20_000])


def test_bytes_per_example():
    from microclip.rules import LossHistory

    rule = LossHistory()
    rule.table.add(torch.arange(1_000_000))
    used = sum(rule.table[name].element_size() for name in (
        "average", "before", "last", "domain", "held", "visits",
    ))  # fmt: skip
    assert used == 16
    assert rule.table.nbytes <= 1.26 * 16 * 1_000_000
    rule.table.compact()
    assert rule.table.nbytes == 16 * 1_000_000


def test_wrong_state_is_refused():
    table = filled([1, 2, 3])
    state = table.state_dict()
    with pytest.raises(ValueError, match="columns"):
        ExampleTable(loss=torch.float32).load_state_dict(state)
    state["columns"]["key"] = state["columns"]["key"][:2]
    with pytest.raises(ValueError, match="one entry per example"):
        ExampleTable(key=torch.int64).load_state_dict(state)


def test_visits_do_not_overflow():
    table = ExampleTable()
    for _ in range(300):
        table.add(torch.tensor([4]))
    assert table["visits"][4] == 255


@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        ([3, 1], "int"),
        (["a", "b"], "str"),
        ([("a", 1), ("b", 2)], "tuple"),
        ([b"x"], "bytes"),
        ([2**63 + 5, 2**70, 3], "int"),
        (["\ud800"], "str"),
        ([], "int"),
    ],
)
def test_kinds_of_ids(ids, kind):
    keys, found = keys_of(ids)
    assert found == kind
    assert len(keys) == len(ids)
    assert len(set(keys.tolist())) == len(ids)


def test_ids_that_cannot_tell_examples_apart():
    with pytest.raises(TypeError, match="they are bool objects such as True"):
        keys_of([True, False])
    with pytest.raises(TypeError, match="mixed"):
        keys_of([1, "1"])
