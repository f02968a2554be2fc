"""A Ledger in a loop with Accelerate: the same training, resumed with its checkpoints."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import microclip
from microclip import Ledger
from microclip.ledger import open_ledger

import processes
import stack_cells
from accelerate_runs import fresh_state

COUNT = 22
EPOCHS = 3


@pytest.fixture(autouse=True)
def new_process():
    fresh_state()
    yield
    fresh_state()


def rows_of(path):
    return [row for batch in open_ledger(path).examples() for row in batch.to_pylist()]


class Run:
    """A loop with accumulation; with a folder, it records."""

    def __init__(self, path=None, size=4):
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dataset = microclip.with_ids(TensorDataset(torch.randn(COUNT, 4), torch.arange(COUNT) % 3))
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, optimizer, DataLoader(dataset, batch_size=size, shuffle=True)
        )
        self.ledger = None
        if path is not None:
            self.ledger = Ledger(path)
            self.accelerator.register_for_checkpointing(self.ledger)

    def train(self, epochs=EPOCHS):
        torch.manual_seed(1)
        for _ in range(epochs):
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(self.loss(*batch))
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        return [p.detach() for p in self.model.parameters()]

    def loss(self, x, y, ids):
        if self.ledger is None:
            return F.cross_entropy(self.model(x), y)
        with self.ledger.recording(ids):
            return F.cross_entropy(self.model(x), y)


def test_training_is_not_changed(tmp_path):
    plain = Run().train()
    fresh_state()
    run = Run(tmp_path)
    found = run.train()
    run.ledger.close()
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    rows = rows_of(tmp_path)
    assert sorted(row["id"] for row in rows) == sorted([*range(COUNT)] * EPOCHS)
    assert all(row["label"] == row["id"] % 3 for row in rows)


def test_resumed_training_continues_the_record(tmp_path):
    run = Run(tmp_path / "ledger")
    run.train(1)
    run.accelerator.save_state(str(tmp_path / "checkpoint"))
    kept = rows_of(tmp_path / "ledger")
    run.train(1)  # lost
    run.ledger.close()
    fresh_state()
    run = Run(tmp_path / "ledger")
    run.accelerator.load_state(str(tmp_path / "checkpoint"))
    run.train(2)
    run.ledger.close()
    rows = rows_of(tmp_path / "ledger")
    assert rows[:COUNT] == kept
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert sorted(row["id"] for row in rows) == sorted([*range(COUNT)] * 3)


def work(rank, folder):
    """Return the parameters without and with a ledger."""
    stack_cells.launched(rank, 2)
    plain = Run(size=2).train()
    fresh_state()
    run = Run(folder, size=2)
    found = run.train()
    run.ledger.close()
    return plain, found


@pytest.mark.full
def test_two_ranks(tmp_path):
    for plain, found in processes.run(work, 2, tmp_path, str(tmp_path / "ledger")):
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    rows = rows_of(tmp_path / "ledger")
    assert {row["rank"] for row in rows} == {0, 1}
    assert {row["id"] for row in rows} == set(range(COUNT))
    assert len(rows) == 24 * EPOCHS  # the loader repeats two examples, to give both as many
