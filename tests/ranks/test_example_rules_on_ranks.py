"""Rules that weight examples on real ranks: training as in one process, whatever their number."""

import pytest
import torch

import example_rank_cells as cells
import processes

WORLDS = (2, pytest.param(4, marks=pytest.mark.full))


@pytest.fixture(scope="module")
def alone():
    """What one process found."""
    return {name: cells.train(name) for name in cells.RULES}


@pytest.fixture(scope="module", params=WORLDS)
def found(request, tmp_path_factory):
    world = request.param
    return processes.run(cells.work, world, tmp_path_factory.mktemp(f"world{world}"), world)


def assert_same(one, other, tolerance=1e-4):
    """Records are float32, so a last bit of a sum may change a weight by 1e-7, which grows."""
    for key, value in one["model"].items():
        torch.testing.assert_close(value, other["model"][key], rtol=tolerance, atol=tolerance)
    rule, twin = (each["clipper"]["rule"] for each in (one, other))
    assert rule.keys() == twin.keys()
    if "table" in rule:
        assert rule["phase"] == twin["phase"]
        order, twin_order = (_order(each["table"]) for each in (rule, twin))
        for name, column in rule["table"]["columns"].items():
            others = twin["table"]["columns"][name][twin_order]
            torch.testing.assert_close(column[order], others, rtol=1e-4, atol=1e-4)


def _order(table):
    """Return the rows by key; with an index, rows are in the order of appearance."""
    keys = table["keys"]
    return torch.arange(table["count"]) if keys is None else keys.argsort()


@pytest.mark.parametrize("name", cells.RULES)
def test_equals_one_process(alone, found, name):
    for each in found:
        assert_same(alone[name], each[name])
    first = found[0][name]["model"]
    for other in found[1:]:
        assert all(torch.equal(value, other[name]["model"][key]) for key, value in first.items())
    assert found[0][name]["messages"] == alone[name]["messages"]


def test_something_was_held_back(alone):
    assert alone["LossHistory"]["phase"] == "holding"
    assert alone["LossHistory + Unit"]["phase"] == "holding"
    least = torch.cat(alone["LossHistory"]["weights"][-8:]).min()
    assert least < 0.1
    assert torch.cat(alone["LossWeight"]["weights"]).min() < 0.9


def test_sharded_models(found, alone):
    if len(found) != 2:
        pytest.skip("two ranks are enough")
    half = cells.train("LossHistory", last=cells.STEPS // 2)
    for each in found:
        for key, value in half["model"].items():
            torch.testing.assert_close(value, each["FSDP"]["model"][key], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("worlds", [(2, 1), pytest.param((4, 2), marks=pytest.mark.full)])
def test_a_checkpoint_moves_to_another_number_of_ranks(alone, tmp_path, worlds):
    before, after = worlds
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    states = processes.run(cells.first_half, before, tmp_path / "before", before)
    state = states[0]
    if after == 1:
        done = [cells.train("LossHistory", first=cells.STEPS // 2, state=state)]
    else:
        done = processes.run(cells.go_on, after, tmp_path / "after", after, state)
    for each in done:
        assert_same(alone["LossHistory"], each)


def test_ids_of_different_types_are_refused(tmp_path):
    for each in processes.run(cells.ids_of_different_types, 2, tmp_path, 2):
        assert "different types in step 0 (rank 0: int, rank 1: str)" in each["error"]
        assert (each["kind"], each["step"]) == ("", 0)
