"""Recording plain training: ids, losses and predictions without a Clipper; data sets with ids."""

import json
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import microclip
from microclip import Ledger, with_ids
from microclip.ledger import open_ledger

from ledger_steps import outcome


def rows_of(path, table="examples", columns=None):
    batches = getattr(open_ledger(path), table)(columns)
    return [row for batch in batches for row in batch.to_pylist()]


class TestSteps:
    def test_rows_of_a_step(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            ledger.record(torch.tensor([7, 3]), torch.tensor([0.5, 1.5]))
            ledger.record([3, 7, 9], [0.25, 0.75, 2.0])
        record = open_ledger(tmp_path)
        assert (record.rows, record.steps, record.classes) == (2, range(2), None)
        found = rows_of(tmp_path, columns=["step", "id", "loss"])
        assert [tuple(row.values()) for row in found] == [
            (0, 7, 0.5),
            (0, 3, 1.5),
            (1, 3, 0.25),
            (1, 7, 0.75),
            (1, 9, 2.0),
        ]
        first, second = rows_of(tmp_path, "microbatches")
        assert first["ids"] == [7, 3]
        assert (first["loss"], second["loss"], second["size"]) == (1.0, 1.0, 3)
        assert first["norm"] is first["bound"] is first["domain"] is None
        assert first["weight"] == 1.0

    def test_predictions(self, tmp_path):
        logits = torch.tensor([[0.1, 0.2, 0.7], [0.6, 0.3, 0.1]]).log()
        with Ledger(tmp_path) as ledger:
            ledger.record(["a", "b"], torch.ones(2), logits=logits, labels=torch.tensor([1, 0]))
        a, b = rows_of(tmp_path)
        assert (a["label"], a["other"], b["label"], b["other"]) == (1, 2, 0, 1)
        assert a["label_probability"] == pytest.approx(0.2)
        assert a["other_probability"] == pytest.approx(0.7)
        assert b["label_probability"] == pytest.approx(0.6)
        assert b["other_probability"] == pytest.approx(0.3)
        assert open_ledger(tmp_path).classes == 3

    @pytest.mark.parametrize("shape", [(2,), (2, 1)])
    def test_one_logit_is_that_of_class_1(self, tmp_path, shape):
        logits = torch.tensor([0.0, 2.0]).view(shape)
        with Ledger(tmp_path) as ledger:
            ledger.record([0, 1], torch.ones(2), logits=logits, labels=torch.tensor([1.0, 0.0]))
        a, b = rows_of(tmp_path)
        assert (a["label"], a["other"], b["label"], b["other"]) == (1, 0, 0, 1)
        assert a["label_probability"] == 0.5
        assert b["other_probability"] == pytest.approx(torch.sigmoid(torch.tensor(2.0)).item())

    def test_labels_that_are_no_class(self, tmp_path):
        """-100 is what losses ignore; a label too large must not crash the device."""
        with Ledger(tmp_path) as ledger:
            labels = torch.tensor([-100, 5, 1])
            ledger.record([0, 1, 2], torch.ones(3), logits=torch.zeros(3, 2), labels=labels)
        found = rows_of(tmp_path)
        assert [row["label"] for row in found] == [-100, 5, 1]
        assert [row["label_probability"] for row in found] == [None, None, 0.5]
        assert [row["other"] for row in found] == [0, 0, 0]

    def test_some_of_the_examples(self, tmp_path):
        logits = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
        with Ledger(tmp_path) as ledger:
            ledger.record(list("abc"), [1.0, 2.0, 3.0], logits=logits, where=[True, False, True])
        found = [(row["id"], row["loss"], row["other"]) for row in rows_of(tmp_path)]
        assert found == [("a", 1.0, 1), ("c", 3.0, 1)]

    def test_whole_numbers_as_floats(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            ledger.record(torch.tensor([3.0, 4.0]), torch.ones(2), domains=[0.5, 0.5])
        assert [row["id"] for row in rows_of(tmp_path)] == [3, 4]

    def test_logits_or_labels_alone(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            ledger.record([0], [1.0], logits=torch.tensor([[0.0, 0.0, 9.0]]))
            ledger.record([0], [1.0], labels=[4])
            ledger.record([0], [1.0])
        first, second, third = rows_of(tmp_path)
        assert (first["label"], first["label_probability"], first["other"]) == (None, None, 2)
        assert (second["label"], second["other"]) == (4, None)
        assert third["label"] is third["other"] is None

    def test_labels_that_are_not_whole_numbers(self, tmp_path):
        ledger = Ledger(tmp_path)
        ledger.record([0, 1], [1.0, 1.0], labels=[0.5, 2.0])
        with pytest.warns(RuntimeWarning, match="not whole numbers"):
            ledger.close()
        assert [row["label"] for row in rows_of(tmp_path)] == [None, 2]

    @pytest.mark.parametrize("make", [torch.tensor, np.array, list])
    def test_tensors_arrays_and_lists_are_recorded_alike(self, tmp_path, make):
        logits = [[0.0, 2.0, 1.0], [3.0, 0.0, 1.0], [0.0, 0.0, 9.0]]
        with Ledger(tmp_path) as ledger:
            ledger.record(
                make([7, 8, 9]), make([0.5, 0.25, 2.0]), logits=make(logits), labels=make([1, 2, 0])
            )
        found = rows_of(tmp_path)
        assert [row["id"] for row in found] == [7, 8, 9]
        assert [row["loss"] for row in found] == [0.5, 0.25, 2.0]
        assert [row["label"] for row in found] == [1, 2, 0]
        assert [row["other"] for row in found] == [2, 0, 2]
        own = torch.tensor(logits).softmax(1)[range(3), [1, 2, 0]]
        assert [row["label_probability"] for row in found] == own.tolist()

    def test_losses_with_graphs_in_a_list(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            ledger.record(np.array([[3], [4]]), list(torch.ones(2, requires_grad=True) * 2))
        assert [(row["id"], row["loss"]) for row in rows_of(tmp_path)] == [(3, 2), (4, 2)]

    def test_a_label_that_is_unknown_has_no_probability(self, tmp_path):
        ledger = Ledger(tmp_path)
        labels = torch.tensor([torch.nan, 0.5, 1])
        ledger.record([0, 1, 2], torch.ones(3), logits=torch.zeros(3, 2), labels=labels)
        with pytest.warns(RuntimeWarning, match="not whole numbers"):
            ledger.close()
        found = rows_of(tmp_path)
        assert [row["label"] for row in found] == [None, None, 1]
        assert [row["label_probability"] for row in found] == [None, None, 0.5]

    def test_nothing_that_happens_to_the_tensors_later_matters(self, tmp_path):
        weight = torch.ones(2, requires_grad=True)
        with Ledger(tmp_path) as ledger:
            ids, losses = torch.tensor([0, 1]), weight * 3
            ledger.record(ids, losses)
            with torch.no_grad():
                losses.zero_()
            ids.zero_()
            waiting = next(iter(ledger._writers.values()))._waiting[0]
            assert not waiting.losses.requires_grad
        assert [(row["id"], row["loss"]) for row in rows_of(tmp_path)] == [(0, 3.0), (1, 3.0)]

    def test_domains_are_neighbors(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            ledger.record([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0], domains=["de", "en", "de", None])
            ledger.record(["x"], [5.0], domains=["en"])
        found = rows_of(tmp_path, "microbatches", ["step", "microbatch", "ids", "domain", "loss"])
        assert [tuple(row.values()) for row in found] == [
            (0, 0, ["1", "3"], "de", 2.0),
            (0, 1, ["2"], "en", 2.0),
            (0, 2, ["4"], None, 4.0),
            (1, 0, ["x"], "en", 5.0),
        ]
        losses = {row["id"]: row["loss"] for row in rows_of(tmp_path)}
        assert losses == {"1": 1.0, "3": 3.0, "2": 2.0, "4": 4.0, "x": 5.0}

    @pytest.mark.parametrize(
        ("ids", "kind"),
        [
            (torch.tensor([5, 6], dtype=torch.int16), int),
            (["a", "b"], str),
            ([("doc", 1), ("doc", 2)], str),
            ([torch.tensor(5), torch.tensor(6)], int),
            (range(2), int),
            (torch.tensor([True, False]), str),
        ],
        ids=repr,
    )
    def test_kinds_of_ids(self, tmp_path, ids, kind):
        with Ledger(tmp_path) as ledger:
            ledger.record(ids, torch.ones(2))
        found = [row["id"] for row in rows_of(tmp_path)]
        assert len(set(found)) == 2
        assert {type(one) for one in found} == {kind}

    def test_options(self, tmp_path):
        with (
            Ledger(tmp_path / "some", every=2) as ledger,
            Ledger(tmp_path / "none", examples=False) as without,
        ):
            for _ in range(5):
                ledger.record([0], [1.0])
                without.record([0], [1.0])
            ledger.record([], torch.zeros(0))
        assert [row["step"] for row in rows_of(tmp_path / "some")] == [0, 2, 4]
        assert not open_ledger(tmp_path / "none").has_examples

    def test_parts_and_ranks(self, tmp_path):
        with Ledger(tmp_path, flush_every=2) as ledger:
            for step in range(5):
                for rank in range(2):
                    ledger.record([rank], [float(step)], rank=rank)
        assert len(list(tmp_path.glob("examples/*.parquet"))) == 6
        found = open_ledger(tmp_path)
        assert (found.steps, found.ranks) == (range(5), (0, 1))


class TestResuming:
    def test_again_from_the_start_replaces_what_was_there(self, tmp_path):
        for loss in (1.0, 2.0):
            with Ledger(tmp_path) as ledger:
                for _ in range(3):
                    ledger.record([0], [loss])
        assert [row["loss"] for row in rows_of(tmp_path)] == [2.0] * 3

    def test_from_a_step_on(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            for _ in range(4):
                ledger.record([0], [1.0])
        with Ledger(tmp_path) as ledger:
            ledger.record([0], [2.0], step=2)
            ledger.record([0], [3.0])
        assert [row["loss"] for row in rows_of(tmp_path)] == [1.0, 1.0, 2.0, 3.0]

    def test_a_ledger_of_the_version_before_is_continued(self, tmp_path):
        from microclip.files import sealed

        with Ledger(tmp_path) as ledger:
            ledger.record(outcome(0))
        file = tmp_path / "ledger.json"
        content = json.loads(file.read_text())
        assert content.pop("version") == 3
        del content["sha256"]
        file.write_text(json.dumps(sealed(content | {"version": 2})))
        with Ledger(tmp_path) as ledger:
            ledger.record([1], [1.0], labels=[3], step=1)
        found = rows_of(tmp_path, columns=["step", "label"])
        assert [(row["step"], row["label"]) for row in found] == [(0, None)] * 4 + [(1, 3)]

    def test_not_beside_a_clipper(self, tmp_path):
        model = torch.nn.Linear(2, 1)
        with Ledger(tmp_path) as ledger:
            clipper = microclip.Clipper(model, 2, ledger=ledger)
            clipper.backward(lambda x: model(x).square().mean(1), torch.randn(4, 2))
            with pytest.raises(ValueError, match="use one of them, or a ledger for each"):
                ledger.record([0], [1.0])
        assert open_ledger(tmp_path).steps == range(1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([1, 2], torch.tensor(1.0)), r"losses must hold one .* for each of the 2 ids.*\(\)"),
        (([1, 2], torch.ones(3)), r"2 ids, but got a tensor of shape \(3,\)"),
        (([1, 2], torch.ones(2, 3)), r"shape \(2, 3\).*within each example"),
        (([1, 2], torch.tensor([1, 2])), "type torch.int64"),
        ((torch.ones(2, 2), torch.ones(2)), r"ids must hold one entry per example.*\(2, 2\)"),
        (("ab", torch.ones(2)), "ids must hold one entry per example, but got 'ab'"),
        ((5, torch.ones(2)), "ids must hold one entry per example, but got 5"),
        ((b"ab", torch.ones(2)), "ids must hold one entry per example, but got b'ab'"),
        ((np.ones((2, 3)), torch.ones(2)), "ids must hold one entry per example, but one of them"),
        (({1, 2}, torch.ones(2)), "ids must be in the order .* but got a set"),
        (([1, 2.5], torch.ones(2)), "ids must be integers or strings, but one of them is 2.5"),
        (([1, float("nan")], torch.ones(2)), "but one of them is nan"),
        ((torch.tensor([1.0, 2.0**24]), torch.ones(2)), "16777216.0: .* below 16777216"),
        ((np.float32([1, 2**24]), torch.ones(2)), "whole and below 16777216"),
        ((torch.tensor([1.0, 256.0]).bfloat16(), torch.ones(2)), "whole and below 256"),
        (([1, 2], ["a", "b"]), "losses must be a tensor, an array or a list of numbers.*'a'"),
    ],
)
def test_ids_and_losses_that_do_not_fit(tmp_path, given, message):
    with Ledger(tmp_path) as ledger:
        with pytest.raises(ValueError, match=message):
            ledger.record(*given)
        ledger.record([0], [1.0])
    assert len(rows_of(tmp_path)) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logits": torch.ones(2, 3, 4)}, "one row for each of the 2 ids.*language models"),
        ({"logits": torch.ones(3, 4)}, r"got shape \(3, 4\)"),
        ({"logits": torch.ones(2, 0)}, r"one column per class, but got shape \(2, 0\)"),
        ({"labels": ["cat", "dog"]}, "labels must be .* a list of numbers, but got .*'cat'"),
        ({"labels": torch.ones(3)}, "labels must hold one class number for each of the 2 ids"),
        ({"labels": torch.ones(2, 4)}, "several labels per example"),
        ({"domains": ["de"]}, "domains must hold one entry per example: there are 2 ids"),
        ({"where": [True]}, r"where must hold True or False for each of the 2 ids.*\(1,\)"),
        ({"where": [0, 1]}, "type torch.int64"),
        ({"step": 1.5}, "step must be 0 or a positive integer, but got 1.5"),
        ({"step": -1}, "step must be 0 or a positive integer, but got -1"),
    ],
)
def test_other_arguments_that_do_not_fit(tmp_path, given, message):
    with Ledger(tmp_path) as ledger, pytest.raises(ValueError, match=message):
        ledger.record([1, 2], torch.ones(2), **given)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda ledger: ledger.record([0], torch.ones(1, device="meta")),
        lambda ledger: torch.func.vmap(lambda x: ledger.record([0], x[None]))(torch.ones(3)),
    ],
    ids=["meta", "vmap"],
)
def test_tensors_without_values(tmp_path, misuse):
    """They must not take along what was recorded before."""
    with Ledger(tmp_path) as ledger:
        ledger.record([0], [1.0])
        with pytest.raises(ValueError, match="losses must be a tensor with values"):
            misuse(ledger)
    assert len(rows_of(tmp_path)) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_and_modes(tmp_path, dtype):
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]], dtype=dtype, requires_grad=True)
    with Ledger(tmp_path) as ledger, torch.autocast("cpu"):
        ledger.record([0, 1], logits.sum(1), logits=logits, labels=torch.tensor([True, False]))
        with torch.inference_mode():
            ledger.record([0, 1], logits.sum(1), logits=logits * 1, labels=np.array([1, 0]))
    found = rows_of(tmp_path)
    assert [row["label"] for row in found] == [1, 0, 1, 0]
    assert {round(row["other_probability"], 2) for row in found} == {0.88}


def test_losses_are_needed(tmp_path):
    with Ledger(tmp_path) as ledger, pytest.raises(TypeError, match="takes ids and losses"):
        ledger.record([1, 2])


def test_keep_records_norms_and_leaves_the_gradient_alone(tmp_path):
    """Norms of plain training, in one pass."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    x, y = torch.randn(12, 5), torch.randint(0, 3, (12,))

    def losses(batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    losses((x, y)).mean().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with Ledger(tmp_path) as ledger:
        clipper = microclip.Clipper(model, 1, rule=microclip.rules.Keep(), ledger=ledger)
        outcome = clipper.backward(losses, (x, y), ids=range(12))
    assert outcome.engine == "fused"
    for found, expected in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(found.grad, expected)
    assert len({row["norm"] for row in rows_of(tmp_path, "microbatches")}) == 12
    assert len(rows_of(tmp_path)) == 12


Pair = namedtuple("Pair", ["x", "y"])


class Samples(Dataset):
    """Samples of any kind, with an attribute of its own."""

    classes = ("cat", "dog")

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.make(range(6)[index])


def pair(i):
    return torch.full((2,), float(i)), i % 2


def entry(i):
    return {"x": torch.full((2,), float(i)), "label": i % 2}


def first_batch(dataset, workers=0):
    return next(iter(DataLoader(dataset, batch_size=3, num_workers=workers)))


class TestWithIds:
    def test_tuples_and_lists(self):
        x, _, ids = first_batch(with_ids(Samples(pair)))
        assert ids.tolist() == [0, 1, 2]
        assert x.shape == (3, 2)
        assert with_ids(Samples(lambda i: [i, i]))[4] == [4, 4, 4]

    def test_dictionaries(self):
        assert first_batch(with_ids(Samples(entry)))["id"].tolist() == [0, 1, 2]
        assert with_ids(Samples(entry), key="row")[5]["row"] == 5
        with pytest.raises(ValueError, match="already have an entry 'label'"):
            with_ids(Samples(entry), key="label")[0]

    @pytest.mark.parametrize(
        "make",
        [torch.tensor, lambda i: Pair(i, i), lambda i: SimpleNamespace(x=i)],
        ids=["tensor", "named tuple", "object"],
    )
    def test_anything_else_becomes_a_pair(self, make):
        sample, identity = with_ids(Samples(make))[3]
        assert identity == 3
        assert sample == make(3)

    def test_named_tuples_stay_what_they_are(self):
        batch, ids = first_batch(with_ids(Samples(lambda i: Pair(i, i))))
        assert batch.x.tolist() == ids.tolist() == [0, 1, 2]

    @pytest.mark.parametrize("ids", [list("abcdef"), torch.arange(10, 16)], ids=["str", "tensor"])
    def test_your_own_ids(self, ids):
        found = first_batch(with_ids(Samples(pair), ids))[2]
        assert list(found) == list(ids[:3])

    def test_ids_that_do_not_fit(self):
        with pytest.raises(ValueError, match="there are 6 examples, but 2 ids"):
            with_ids(Samples(pair), [1, 2])
        with pytest.raises(TypeError, match=r"the id of example 1 is \('a', 1\)\. Use str"):
            with_ids(Samples(pair), [("a", i) for i in range(6)])[1]

    def test_parts_keep_the_ids_of_the_whole(self):
        assert first_batch(Subset(with_ids(Samples(pair)), [5, 1, 3]))[2].tolist() == [5, 1, 3]

    def test_positions(self):
        dataset = with_ids(Samples(pair))
        assert dataset[-1][2] == 5
        assert dataset[torch.tensor(2)][2] == 2
        with pytest.raises(TypeError, match="the position of one example, but got slice"):
            with_ids(TensorDataset(torch.zeros(4)))[1:3]

    def test_everything_else_comes_from_the_data_set(self):
        dataset = with_ids(Samples(pair))
        assert len(dataset) == 6
        assert dataset.classes == ("cat", "dog")
        with pytest.raises(AttributeError, match="nothing"):
            _ = dataset.nothing

    def test_several_at_once(self):
        class Fast(Samples):
            def __getitems__(self, indices):
                return [self.make(index * 10) for index in indices]

        assert with_ids(Fast(pair)).__getitems__([2, 1])[0][2] == 2
        assert first_batch(with_ids(Fast(pair)))[0][:, 0].tolist() == [0.0, 10.0, 20.0]

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_workers(self):
        assert first_batch(with_ids(Samples(pair)), workers=1)[2].tolist() == [0, 1, 2]

    def test_collator_of_transformers(self):
        from transformers import default_data_collator

        dataset = with_ids(Samples(entry))
        batch = default_data_collator([dataset[4], dataset[2]])
        assert batch["id"].tolist() == [4, 2]
        assert batch["labels"].tolist() == [0, 0]

    def test_twice(self):
        with pytest.raises(ValueError, match="has ids already"):
            with_ids(with_ids(Samples(pair)))

    def test_iterable_data_sets(self):
        class Stream(IterableDataset):
            def __iter__(self):
                yield 1

        with pytest.raises(TypeError, match="Stream can only be iterated over. Let it yield an id"):
            with_ids(Stream())


class TestRecording:
    """The loss function of torch that a block calls, with a loss for each of its rows."""

    def rows(self, path, function, *arguments, count=6, **options):
        torch.manual_seed(0)
        with Ledger(path) as ledger:
            with ledger.recording(list(range(count))):
                result = function(*arguments, **options)
            assert result.requires_grad
            expected = function(*arguments, **options)
            assert torch.equal(result, expected)
        return [row for batch in open_ledger(path).examples() for row in batch.to_pylist()]

    @pytest.mark.parametrize(
        "options",
        [{}, {"label_smoothing": 0.1}, {"weight": torch.tensor([1.0, 2.0, 3.0])},
         {"reduction": "sum"}, {"reduction": "none"}],
    )  # fmt: skip
    def test_classes(self, tmp_path, options):
        logits, labels = torch.randn(6, 3, requires_grad=True), torch.tensor([0, 1, 2, 2, 1, 0])
        rows = self.rows(tmp_path, F.cross_entropy, logits, labels, **options)
        options.pop("reduction", None)
        each = [F.cross_entropy(logits[[i]], labels[[i]], **options).item() for i in range(6)]
        assert [row["loss"] for row in rows] == pytest.approx(each)
        assert [row["label"] for row in rows] == labels.tolist()
        own = logits.softmax(1).gather(1, labels[:, None]).squeeze(1)
        assert [row["label_probability"] for row in rows] == pytest.approx(own.tolist())

    def test_modules_and_old_arguments(self, tmp_path):
        logits, labels = torch.randn(6, 3, requires_grad=True), torch.tensor([0, 1, 2, 2, 1, 0])
        rows = self.rows(tmp_path / "module", nn.CrossEntropyLoss(), logits, labels)
        assert [row["label"] for row in rows] == labels.tolist()
        rows = self.rows(tmp_path / "words", nn.NLLLoss(), logits.log_softmax(1), labels)
        each = F.cross_entropy(logits, labels, reduction="none")
        assert [row["loss"] for row in rows] == pytest.approx(each.tolist())

    @pytest.mark.parametrize("weight", [None, torch.tensor([0.1, 1.0, 4.0])])
    def test_labels_of_pixels_and_those_that_do_not_count(self, tmp_path, weight):
        logits = torch.randn(6, 3, 4, requires_grad=True)
        labels = torch.randint(3, (6, 4))
        labels[0, 1:], labels[1] = -100, -100  # an example without targets has no loss
        rows = self.rows(tmp_path, F.cross_entropy, logits, labels, weight=weight)
        alone = [F.cross_entropy(logits[[i]], labels[[i]], weight=weight) for i in range(6)]
        assert [row["id"] for row in rows] == [0, 2, 3, 4, 5]
        expected = [loss.item() for loss in alone if not loss.isnan()]
        assert [row["loss"] for row in rows] == pytest.approx(expected)
        assert {row["label"] for row in rows} == {None}

    def test_steps_in_which_nothing_counts(self, tmp_path):
        logits, ignored = torch.randn(2, 3, requires_grad=True), torch.tensor([-100, -100])
        with Ledger(tmp_path) as ledger:
            for labels in (ignored, torch.tensor([-100, 1]), ignored):
                with ledger.recording(torch.tensor([7, 8]), domains=["a", "b"]):
                    F.cross_entropy(logits, labels)
        assert [(row["step"], row["id"]) for row in rows_of(tmp_path)] == [(1, 8)]
        (row,) = rows_of(tmp_path, "microbatches")
        assert (row["ids"], row["size"], row["domain"]) == ([8], 1, "b")
        with Ledger(tmp_path) as ledger, ledger.recording([7, 8], step=5):
            F.cross_entropy(logits, ignored)
        assert open_ledger(tmp_path).steps == range(1, 2)

    def test_half_precision_does_not_overflow(self, tmp_path):
        logits = torch.zeros(2, 2, 9000, dtype=torch.float16)
        logits[:, 0] = 20
        logits.requires_grad_()
        labels = torch.ones(2, 9000, dtype=torch.int64)
        rows = self.rows(tmp_path, F.cross_entropy, logits, labels, count=2)
        assert [row["loss"] for row in rows] == [20.0, 20.0]

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize(
        ("function", "shapes"),
        [
            (F.gaussian_nll_loss, [(6,), (6,), (6,)]),
            (F.poisson_nll_loss, [(6,), (6,)]),
            (F.multi_margin_loss, [(6, 3), 6]),
            (F.soft_margin_loss, [(6,), (6,)]),
            (F.margin_ranking_loss, [(6,), (6,), (6,)]),
            (F.cosine_embedding_loss, [(6, 3), (6, 3), (6,)]),
            (F.triplet_margin_loss, [(6, 3), (6, 3), (6, 3)]),
        ],
    )
    def test_other_functions(self, tmp_path, function, shapes, reduction):
        given = [torch.rand(s) if isinstance(s, tuple) else torch.arange(s) % 3 for s in shapes]
        given[0].requires_grad_()
        if function in (F.cosine_embedding_loss, F.margin_ranking_loss):
            given[2] = torch.tensor([1.0, -1.0] * 3)
        rows = self.rows(tmp_path, function, *given, reduction=reduction)
        expected = function(*given, reduction="none").tolist()
        assert [row["loss"] for row in rows] == pytest.approx(expected)

    def test_ctc(self, tmp_path):
        scores = torch.randn(7, 4, 5, requires_grad=True).log_softmax(2)
        given = scores, torch.randint(1, 5, (4, 3)), (7, 7, 6, 7), (3, 1, 2, 3)
        rows = self.rows(tmp_path, F.ctc_loss, *given, count=4)
        losses = [row["loss"] for row in rows]
        assert sum(losses) / 4 == pytest.approx(F.ctc_loss(*given).item())

    @pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 1, 1, 1)])
    def test_one_score_of_any_shape(self, tmp_path, shape):
        scores, truth = torch.randn(shape, requires_grad=True), torch.ones(shape)
        rows = self.rows(tmp_path, F.binary_cross_entropy_with_logits, scores, truth)
        own = scores.sigmoid().flatten().tolist()
        assert [row["label_probability"] for row in rows] == pytest.approx(own)

    @pytest.mark.filterwarnings("ignore:Using a target size")
    @pytest.mark.parametrize(
        "aside",
        [
            lambda x: F.mse_loss(x.mean(), torch.tensor(0.0)),
            lambda x: F.mse_loss(x[:, 0], torch.tensor(0.0)),
            lambda x: F.mse_loss(x[:0], x[:0].detach(), reduction="sum"),
        ],
        ids=["scalars", "scalar target", "empty"],
    )
    def test_calls_without_rows_do_not_count(self, tmp_path, aside):
        logits, labels = torch.randn(6, 3, requires_grad=True), torch.tensor([0, 1, 2, 2, 1, 0])
        rows = self.rows(tmp_path, lambda: F.cross_entropy(logits, labels) + aside(logits))
        each = F.cross_entropy(logits, labels, reduction="none")
        assert [row["loss"] for row in rows] == pytest.approx(each.tolist())

    def test_one_example_that_is_not_a_batch(self, tmp_path):
        logits, label = torch.randn(3, requires_grad=True), torch.tensor(1)
        (row,) = self.rows(tmp_path, F.cross_entropy, logits, label, count=1)
        assert row["loss"] == pytest.approx(F.cross_entropy(logits, label).item())
        assert row["label"] == 1

    def test_an_empty_batch_and_ids_of_a_generator(self, tmp_path):
        logits, labels = torch.randn(2, 3, requires_grad=True), torch.tensor([0, 1])
        with Ledger(tmp_path) as ledger:
            with ledger.recording([]):
                F.cross_entropy(logits[:0], labels[:0], reduction="sum")
            with ledger.recording(i for i in (7, 8)):
                F.cross_entropy(logits, labels)
            with pytest.raises(ValueError, match="ids must .* but got 5"), ledger.recording(5):
                pass
        assert [(row["step"], row["id"]) for row in rows_of(tmp_path)] == [(1, 7), (1, 8)]

    @pytest.mark.parametrize(
        ("function", "message"),
        [
            (
                lambda x: (F.mse_loss(x, -x.detach(), reduction="none") * (x > 0)).mean(),
                r'mse_loss .* reduction="none" .* shape \(6, 4\).* ledger\.record\(ids, losses\)',
            ),
            (
                lambda x: F.mse_loss(x, -x.detach(), reduce=False),
                r'reduction="none" .* shape \(6, 4\)',
            ),
            (
                lambda x: F.nll_loss(x.view(12, 2), torch.zeros(12).long()) + F.l1_loss(x, x * 2),
                "nll_loss of 12 rows, l1_loss of 6 rows was called",
            ),
            (
                lambda x: F.ctc_loss(
                    x.view(2, 6, 2), torch.ones(6, 1).long(), (2,) * 6, (1,) * 6
                ) + F.l1_loss(x, x * 2),
                "ctc_loss of 6 rows, l1_loss of 6 rows was called",
            ),
        ],
        ids=["mask", "old arguments", "tokens", "ctc"],
    )  # fmt: skip
    @pytest.mark.filterwarnings("ignore:size_average and reduce args")
    def test_what_cannot_be_known(self, tmp_path, function, message):
        x = torch.randn(6, 4, requires_grad=True)
        ledger = Ledger(tmp_path)
        with pytest.raises(ValueError, match=message), ledger.recording(range(6)):
            function(x)

    def test_numbers(self, tmp_path):
        found, wanted = torch.randn(6, 2, requires_grad=True), torch.randn(6, 2)
        rows = self.rows(tmp_path / "squares", F.mse_loss, found, wanted)
        expected = (found - wanted).square().mean(1).tolist()
        assert [row["loss"] for row in rows] == pytest.approx(expected)
        scores, truth = torch.randn(6, 1, requires_grad=True), torch.ones(6, 1)
        rows = self.rows(tmp_path / "two", F.binary_cross_entropy_with_logits, scores, truth)
        assert {row["label"] for row in rows} == {1}
        p = scores.sigmoid().flatten().tolist()
        assert [row["label_probability"] for row in rows] == pytest.approx(p)

    def test_what_is_not_differentiated_does_not_count(self, tmp_path):
        logits, labels = torch.randn(6, 3, requires_grad=True), torch.zeros(6).long()

        def function():
            with torch.no_grad():
                F.cross_entropy(logits, labels)
            return F.cross_entropy(logits, labels)

        assert len(self.rows(tmp_path, function)) == 6

    def test_several(self, tmp_path):
        logits, labels = torch.randn(6, 3, requires_grad=True), torch.zeros(6).long()
        ledger = Ledger(tmp_path)
        twice = "cross_entropy of 6 rows, cross_entropy of 6 rows was called"
        with pytest.raises(ValueError, match=twice), ledger.recording(range(6)):
            F.cross_entropy(logits, labels) + F.cross_entropy(-logits, labels)
        few = "of 5 examples .* cross_entropy of 6 rows was"
        with pytest.raises(ValueError, match=few), ledger.recording(range(5)):
            F.cross_entropy(logits, labels)
        ledger.close()
        with pytest.raises(ValueError, match="is empty"):
            open_ledger(tmp_path)


def test_state_for_checkpoints(tmp_path):
    with Ledger(tmp_path) as ledger:
        assert ledger.state_dict() == {"next_step": 0}
        for step in range(4):
            ledger.record([step], [1.0])
            if step == 1:
                state = ledger.state_dict()
        ledger.load_state_dict(state)  # back to the checkpoint, in the same process
        ledger.record([20], [2.0])
    with Ledger(tmp_path) as ledger:
        ledger.load_state_dict(state)
        ledger.record([30], [3.0])
        with pytest.raises(ValueError, match="has the entry 'next_step', but got {}"):
            ledger.load_state_dict({})
    rows = [row for batch in open_ledger(tmp_path).examples() for row in batch.to_pylist()]
    assert [(row["step"], row["id"]) for row in rows] == [(0, 0), (1, 1), (2, 30)]
