"""Predictions in clipped runs: those of the examples on record, whatever the engine does."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from microclip import Clipper, Ledger, find_issues, rules
from microclip.ledger import open_ledger

import processes

CLASSES, COUNT = 5, 12


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def data(count=COUNT):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=draw)
    return x, torch.randint(CLASSES, (count,), generator=draw)


def loss_fn_of(model, ledger, recorded=True):
    def loss_fn(batch):
        logits = model(batch[0])
        if recorded:
            ledger.record_predictions(logits, batch[1])
        return F.cross_entropy(logits, batch[1], reduction="none")

    return loss_fn


def expected(model, x, y):
    """Return what should be on record, by id."""
    found = {}
    with torch.no_grad():
        for i, (logits, label) in enumerate(zip(model(x), y.tolist(), strict=True)):
            p = logits.softmax(0)
            rest = p.clone()
            rest[label] = -1
            found[i] = label, p[label].item(), rest.argmax().item(), rest.max().item()
    return found


def rows_of(path):
    return [row for batch in open_ledger(path).examples() for row in batch.to_pylist()]


def check(rows, truth, count=COUNT):
    assert sorted(row["id"] for row in rows) == list(range(count))
    for row in rows:
        label, own, other, highest = truth[row["id"]]
        assert (row["label"], row["other"]) == (label, other)
        assert row["label_probability"] == pytest.approx(own, rel=1e-5)
        assert row["other_probability"] == pytest.approx(highest, rel=1e-5)
        assert row["loss"] == pytest.approx(-torch.tensor(own).log().item(), rel=1e-4)


RULES = {
    "MinNorm": rules.MinNorm,
    "Median": rules.Median,  # does not stream
    "Keep": rules.Keep,
    "LossHistory": lambda: rules.LossHistory(10),
}


@pytest.mark.parametrize("domains", [None, ["b", "a", "c"] * 4])
@pytest.mark.parametrize(
    ("rule", "engine"),
    [
        *((name, "auto") for name in RULES),
        ("MinNorm", "stream"),
        ("MinNorm", "two_pass"),
        ("MinNorm", "fused"),
        ("Median", "fused"),
        ("LossHistory", "stream"),
    ],
)
def test_of_every_engine(tmp_path, rule, engine, domains):
    """With checks in every step, which call loss_fn for other rows; the model is not changed."""
    model, (x, y) = network(), data()
    truth = expected(model, x, y)
    with Ledger(tmp_path / "one") as ledger:
        clipper = Clipper(
            model, 2, rule=RULES[rule](), engine=engine, verify="always", ledger=ledger
        )
        for _ in range(2):
            loss_fn = loss_fn_of(model, ledger)
            clipper.backward(loss_fn, (x, y), ids=list(range(COUNT)), domains=domains)
    rows = rows_of(tmp_path / "one")
    for step in range(2):
        check([row for row in rows if row["step"] == step], truth)
    assert open_ledger(tmp_path / "one").classes == CLASSES


@pytest.mark.parametrize("engine", ["stream", "fused"])
def test_the_gradient_is_not_changed(tmp_path, engine):
    found = []
    for recorded in (False, True):
        model, (x, y) = network(), data()
        with Ledger(tmp_path / str(recorded)) as ledger:
            clipper = Clipper(model, 2, engine=engine, ledger=ledger)
            clipper.backward(loss_fn_of(model, ledger, recorded), (x, y))
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("engine", ["stream", "two_pass", "fused"])
def test_in_chunks(tmp_path, engine):
    model, (x, y) = network(), data()
    with Ledger(tmp_path) as ledger:
        clipper = Clipper(model, 2, engine=engine, ledger=ledger)
        for rows in torch.arange(COUNT).split(4):
            clipper.fold(loss_fn_of(model, ledger), (x[rows], y[rows]), ids=rows)
        clipper.finish()
    check(rows_of(tmp_path), expected(model, x, y))


def test_after_own_backward(tmp_path):
    model, (x, y) = network(), data()
    truth = expected(model, x, y)
    with Ledger(tmp_path) as ledger:
        clipper = Clipper(model, ledger=ledger)
        for rows in torch.arange(COUNT).split(4):
            losses = loss_fn_of(model, ledger)((x[rows], y[rows]))
            (losses.mean() / 3).backward()
            clipper.fold(loss=losses / 3, loss_scale=1 / 3, ids=rows)
        clipper.finish()
    check(rows_of(tmp_path), truth)


def test_dropout_belongs_to_the_recorded_losses(tmp_path):
    model, (x, y) = network(), data()
    model.insert(2, nn.Dropout(0.5))
    with Ledger(tmp_path) as ledger:
        clipper = Clipper(model, 2, engine="fused", verify="always", ledger=ledger)
        clipper.backward(loss_fn_of(model, ledger), (x, y))
    for row in rows_of(tmp_path):
        assert row["label_probability"] == pytest.approx(
            torch.tensor(-row["loss"]).exp().item(), rel=1e-4
        )


def test_some_steps_without(tmp_path):
    model, (x, y) = network(), data()
    truth = expected(model, x, y)
    with Ledger(tmp_path) as ledger:
        clipper = Clipper(model, 2, engine="stream", ledger=ledger)
        for step in range(2):
            loss_fn = loss_fn_of(model, ledger, recorded=step == 1)
            clipper.backward(loss_fn, (x, y), ids=list(range(COUNT)))
    rows = rows_of(tmp_path)
    assert {row["label"] for row in rows if row["step"] == 0} == {None}
    check([row for row in rows if row["step"] == 1], truth)


def test_a_failed_single_pass_leaves_nothing(tmp_path):
    """The engine changes in the middle of a step; what it had seen does not count."""
    model, (x, y) = network(), data()
    truth, calls = expected(model, x, y), []

    def loss_fn(batch):
        logits = model(batch[0])
        ledger.record_predictions(logits, batch[1])
        calls.append(len(batch[0]))
        if len(calls) > 1 and len(batch[0]) == COUNT:
            raise RuntimeError("out of luck")
        return F.cross_entropy(logits, batch[1], reduction="none")

    with Ledger(tmp_path) as ledger:
        clipper = Clipper(model, 2, verify="never", ledger=ledger)
        clipper.load_state_dict(
            {
                "step": 1,
                "rule": {},
                "trials": [
                    {
                        "loss": None, "size": (COUNT, COUNT // 2), "engine": "fused",
                        "reason": "", "seconds": {"fused": 1.0, "stream": 2.0},
                    }
                ],
            }
        )  # fmt: skip
        calls.append(0)
        outcome = clipper.backward(loss_fn, (x, y), ids=list(range(COUNT)))
    assert outcome.engine == "stream"
    check(rows_of(tmp_path), truth)


def test_suggested_labels(tmp_path):
    """Six epochs with a few wrong labels: they are found, and the right ones are named."""
    torch.manual_seed(0)
    centers = 4 * torch.eye(CLASSES)
    y = torch.arange(150) % CLASSES
    x = centers[y] + 0.5 * torch.randn(150, CLASSES)
    given = y.clone()
    wrong = torch.arange(0, 150, 15)
    given[wrong] = (y[wrong] + 1) % CLASSES
    model = nn.Linear(CLASSES, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Ledger(tmp_path) as ledger:
        clipper = Clipper(model, 5, engine="stream", ledger=ledger)
        for _ in range(6):
            for rows in torch.randperm(150).split(30):
                optimizer.zero_grad()
                clipper.backward(loss_fn_of(model, ledger), (x[rows], given[rows]), ids=rows)
                optimizer.step()
    rows = find_issues(tmp_path).flagged.to_pylist()
    assert {row["id"] for row in rows} >= set(wrong.tolist())
    assert all(
        row["suggested_label"] == y[row["id"]] for row in rows if row["id"] in wrong.tolist()
    )


class TestMistakes:
    def run(self, path, loss_fn, **options):
        model, batch = network(), data()
        with Ledger(path) as ledger:
            clipper = Clipper(model, 2, engine="stream", ledger=ledger, **options)
            clipper.backward(lambda batch: loss_fn(model, ledger, batch), batch)

    def test_a_mean_loss(self, tmp_path):
        def loss_fn(model, ledger, batch):
            logits = model(batch[0])
            ledger.record_predictions(logits, batch[1])
            return F.cross_entropy(logits, batch[1])

        with pytest.raises(ValueError, match="one loss for each of the 2 predictions"):
            self.run(tmp_path, loss_fn)

    def test_twice(self, tmp_path):
        def loss_fn(model, ledger, batch):
            logits = model(batch[0])
            ledger.record_predictions(logits, batch[1])
            ledger.record_predictions(logits)
            return F.cross_entropy(logits, batch[1], reduction="none")

        with pytest.raises(ValueError, match="called 2 times for one batch"):
            self.run(tmp_path, loss_fn)

    def test_other_order(self, tmp_path):
        model, batch = network(), data()
        with Ledger(tmp_path) as ledger:
            clipper = Clipper(model, 2, engine="fused", verify="never", ledger=ledger)

            def loss_fn(batch):
                logits = model(batch[0].flip(0))
                ledger.record_predictions(logits, batch[1].flip(0))
                return F.cross_entropy(logits, batch[1].flip(0), reduction="none")

            with pytest.raises(ValueError, match="in an order other than"):
                clipper.backward(loss_fn, batch)
        assert all(p.grad is None for p in model.parameters())

    def test_without_a_clipper(self, tmp_path):
        with Ledger(tmp_path) as ledger, pytest.raises(ValueError, match="no Clipper has this"):
            ledger.record_predictions(torch.zeros(2, 3))

    def test_own_backward_of_other_sizes(self, tmp_path):
        model, (x, y) = network(), data()
        with Ledger(tmp_path) as ledger:
            clipper = Clipper(model, ledger=ledger)
            losses = loss_fn_of(model, ledger)((x, y))
            losses.mean().backward()
            with pytest.raises(ValueError, match="called for 12 examples, but fold"):
                clipper.fold(loss=losses.mean(), size=COUNT)

    def test_evaluation_does_not_count(self, tmp_path):
        model, (x, y) = network(), data()
        truth = expected(model, x, y)
        with Ledger(tmp_path) as ledger:
            clipper = Clipper(model, ledger=ledger)
            with torch.no_grad():
                loss_fn_of(model, ledger)((x[:3], y[:3]))
            losses = loss_fn_of(model, ledger)((x, y))
            losses.mean().backward()
            clipper.fold(loss=losses)
            clipper.finish()
        check(rows_of(tmp_path), truth)


def work(rank, path, sharded):
    model = fully_shard(network()) if sharded else DistributedDataParallel(network())
    x, y = data()
    mine = torch.arange(COUNT)[rank * 6 : rank * 6 + 6]
    with Ledger(path) as ledger:
        clipper = Clipper(model, 2, ledger=ledger)
        clipper.backward(loss_fn_of(model, ledger), (x[mine], y[mine]), ids=mine)


@pytest.mark.full
@pytest.mark.parametrize("sharded", [False, True])
def test_several_ranks(tmp_path, sharded):
    processes.run(work, 2, tmp_path, str(tmp_path / "ledger"), sharded)
    check(rows_of(tmp_path / "ledger"), expected(network(), *data()))
