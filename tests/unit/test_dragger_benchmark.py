"""The benchmark of draggers: its measures and its own versions of rival scores, by hand."""

import pytest
import torch

pytest.importorskip("cleanlab", reason="a rival of the benchmark, in the extra 'bench'")

import draggers as benchmark

from dragger_data import Noisy, digits
from dragger_rivals import Watcher, el2n, grand


def noisy(labels, features=2):
    labels = torch.tensor(labels)
    images = torch.eye(features)[: len(labels)]
    return Noisy(images, labels, torch.zeros(len(labels), dtype=torch.bool), images, labels)


def test_measures():
    wrong = torch.tensor([True, False, True, False])
    assert benchmark.measures(wrong, torch.tensor([4.0, 1.0, 3.0, 2.0])) == (1, 1, 1)
    auroc, precision, recall = benchmark.measures(wrong, torch.tensor([4.0, 3.0, 1.0, 2.0]))
    assert (auroc, precision, recall) == (0.5, pytest.approx((1 + 2 / 4) / 2), 0.5)


def test_forgetting():
    """0 is learned for good, 1 is forgotten twice, 2 never learned."""
    watcher = Watcher(noisy([0, 0, 1], features=3))
    rows = torch.arange(3)
    for answers in ([0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 1, 0]):
        logits = torch.nn.functional.one_hot(torch.tensor(answers), 2).float()
        watcher(rows, logits, torch.tensor([0.0, 1.0, 3.0]))
    assert watcher.forgetting.tolist() == [0, 2, 3]
    assert watcher.mean_loss.tolist() == [0, 1, 3]


def test_el2n_and_grand():
    """A linear network that answers 1/10 for every class: the error is (9/10, -1/10, ...)."""
    model = torch.nn.Linear(2, 10)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    error = (0.9**2 + 9 * 0.1**2) ** 0.5
    data = noisy([3, 7])
    assert el2n(model, data).tolist() == pytest.approx([error] * 2)
    # the weight's gradient is error x image, of length 1; the bias's is the error
    assert grand(model, data).tolist() == pytest.approx([2**0.5 * error] * 2)


def test_the_share_of_wrong_digits():
    data = digits(seed=0)
    assert (len(data), len(data.test_labels)) == (1297, 500)
    assert int(data.wrong.sum()) == round(0.2 * 1297)
    assert torch.equal(data.labels, digits(seed=0).labels)
    rows = data.wrong.nonzero().squeeze(1)
    assert data.only(rows).wrong.all()


def test_finished_runs_are_kept(tmp_path):
    kept = benchmark.Kept(tmp_path / "runs.jsonl")
    kept.add("one", {"accuracy": 50.0})
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"key": "two", "resu')  # the process was killed here
    kept = benchmark.Kept(tmp_path / "runs.jsonl")
    assert kept.results == {"one": {"accuracy": 50.0}}
    kept.add("three", {})
    assert list(benchmark.Kept(tmp_path / "runs.jsonl").results) == ["one", "three"]
