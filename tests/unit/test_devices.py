"""Engines and rules on a device other than the host: nothing is mixed, and hardly anything is read.

The device is a stand-in (`stand_in_device`), once with float64 and once without, in a process of
its own. With MICROCLIP_TEST_DEVICE=cuda, mps or xpu it is a real one as well (`make test-gpu`).
"""

import os

import pytest
import stand_in_ranks
from device_cells import BY_DISPATCH, CELLS, ORDINARY, ZOO, Child
from device_models import EXAMPLES
from device_zoo import READING

import zoo

REAL = os.environ.get("MICROCLIP_TEST_DEVICE")
TOLERANCE = {"torch.float32": 3e-6, "torch.float64": 1e-13, "torch.bfloat16": 2e-2}


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.full)])
def on_ranks(request, tmp_path_factory):
    """What two ranks found in the cells of this run, with float64 and without."""
    items = [item for item in request.session.items if "on_ranks" in item.fixturenames]
    names = list(dict.fromkeys(item.callspec.params["name"] for item in items))
    folder = tmp_path_factory.mktemp("ranks")
    return request.param, stand_in_ranks.run(2, folder, names, request.param)


@pytest.fixture(scope="module")
def children():
    found = {name: Child(name) for name in ("accel", "accel32", *([REAL] if REAL else []))}
    yield found
    for child in found.values():
        child.close()


def reads_of(cell, engine):
    """Return how often the host reads the device in an ordinary step of an engine: mostly never."""
    reads = 0
    microbatches = -(-EXAMPLES // cell.b) if cell.b and "clipped" in cell.rule else 1
    if engine == "two_pass":  # whether both passes of the step before were the same
        reads += 1
    if cell.nonfinite != "propagate":  # whether there is something to skip
        reads += 1
    if "History" in cell.rule or "Weight" in cell.rule:  # the losses, for the rule's memory
        reads += 1
    if cell.rule == "NormHistory":
        reads += 1
    if "LossWeight" in cell.rule:  # in every forward pass: its losses make the weights
        reads += {"fused": 1, "stream": microbatches, "two_pass": 2 * microbatches}[engine]
    if cell.model == "sorted" and engine == "fused":  # whose row is it now, after each indexing
        reads += 2
    return reads


def reads_of_ranks(cell, float64):
    """Return how often ranks read what they heard of each other, in an ordinary step."""
    reads = 1  # whether all were in step, one step later
    if cell.domains or not float64:  # which domains there are, or the whole message
        reads += 1
    if cell.reduction == "sum":  # the sizes of all micro-batches
        reads += 1
    if cell.nonfinite == "raise":  # whether another rank will raise
        reads += 1
    if "History" in cell.rule or "Weight" in cell.rule:  # what others saw of their examples
        reads += 1
    return reads


def check(answer, cell, real=False, more=0):
    if "skipped" in answer:
        pytest.skip(answer["skipped"])
    assert "error" not in answer, answer["error"]
    if not (real and cell.model == "dropout"):  # whose masks are others there
        tolerance = TOLERANCE[str(cell.dtype)] * (30 if real else 1)
        assert answer["difference"] <= tolerance, answer["worst"]
    steps = [answer["reads"][step] for step in ORDINARY if step < len(answer["reads"])]
    expected = reads_of(cell, answer["engine"]) + more
    for reads in steps:
        found = sum(reads.values())
        assert found <= expected if real else found == expected, reads


@pytest.mark.sample(13)
@pytest.mark.parametrize("name", CELLS)
def test_a_device_gives_what_the_host_gives_without_reads(children, name):
    check(children["accel"].ask(name), CELLS[name])


@pytest.mark.sample(29)
@pytest.mark.parametrize("name", CELLS)
def test_so_does_one_without_float64(children, name):
    check(children["accel32"].ask(name), CELLS[name])


@pytest.mark.full
@pytest.mark.parametrize("engine", ["stream", "two_pass", "fused"])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_so_do_all_kinds_of_models(children, name, engine):
    if engine == "fused" and name in zoo.CANNOT_FUSE:
        pytest.skip("Refused on any device.")
    if engine != "fused" and name == "lstm":
        pytest.skip("torch has no kernel for the cells of an LSTM on unknown devices.")
    answer = children["accel"].ask(f"{ZOO}{name} {engine}")
    assert "error" not in answer, answer["error"]
    assert answer["difference"] < 1e-6
    if name not in READING:
        found = [sum(answer["reads"][step].values()) for step in ORDINARY]
        assert found == [int(engine == "two_pass")] * len(ORDINARY), answer["reads"]


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", stand_in_ranks.CELLS)
def test_so_do_two_ranks(on_ranks, name):
    float64, found = on_ranks
    cell = stand_in_ranks.CELLS[name]
    for answer in found:
        check(answer[name], cell, more=reads_of_ranks(cell, float64))


@pytest.mark.skipif(REAL is None, reason="for `make test-gpu`")
@pytest.mark.parametrize("name", CELLS if REAL else ["a real device"])
def test_so_does_a_real_one(children, name):
    check(children[REAL].ask(name), CELLS[name], real=True)


@pytest.mark.parametrize("name", ["fused: MinNorm", "two_pass: LossWeight, clipped"])
def test_reads_are_counted_alike_on_real_devices(children, name):
    """There, by a dispatch mode."""
    real, own = (children["accel"].ask(prefix + name) for prefix in (BY_DISPATCH, ""))
    counts = [[sum(reads.values()) for reads in answer["reads"]] for answer in (real, own)]
    assert counts[0] == counts[1]
    assert counts[0][0] > 0


@pytest.mark.parametrize("device", ["accel", "accel32"])
def test_the_stand_in_refuses_mixes(children, device):
    assert children[device].ask("mixes") == {"accepted": ["number"]}


@pytest.mark.parametrize("prefix", ["", BY_DISPATCH])
def test_every_way_to_read_counts(children, prefix):
    found = children["accel"].ask(f"{prefix}ways_to_read")
    assert [name for name, reads in found.items() if reads == 0] == ["nothing", "upload"]
    assert all(reads <= 1 for reads in found.values()), found


def test_float64_is_where_it_is(children):
    every = ["double", "zeros", "sum", "upload"]
    wide = {"made": every, "widest": "torch.float64"}
    assert children["accel"].ask("makes_float64") == wide
    assert children["accel32"].ask("makes_float64") == {"made": [], "widest": "torch.float32"}
