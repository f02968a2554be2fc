"""Finding wrong labels in the record of plain training, and what happens if the record is bad."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional as F

import microclip
from microclip import Clipper, Ledger, cli, find_issues
from microclip.issues import KINDS, mixture
from microclip.issues.votes import Votes

CLASSES = 10


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def digits(share, seed, count=1000):
    """Return images, given labels, true labels and which ones are wrong."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    draw = np.random.default_rng(seed)
    rows = draw.permutation(len(labels))[:count]
    given, wrong = labels[rows].copy(), np.zeros(count, dtype=bool)
    wrong[draw.choice(count, round(share * count), replace=False)] = True
    given[wrong] = (given[wrong] + draw.integers(1, CLASSES, wrong.sum())) % CLASSES
    x = torch.tensor(images[rows] / 16, dtype=torch.float32)
    return SimpleNamespace(x=x, given=torch.tensor(given), true=labels[rows], wrong=wrong)


def train(path, data, seed=0, epochs=12, logits=True, ids=None):
    """Train plainly, with a ledger."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, CLASSES)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with Ledger(path) as ledger:
        for _ in range(epochs):
            for rows in torch.randperm(len(data.x)).split(50):
                outputs = model(data.x[rows])
                losses = F.cross_entropy(outputs, data.given[rows], reduction="none")
                optimizer.zero_grad()
                losses.mean().backward()
                optimizer.step()
                more = {"logits": outputs, "labels": data.given[rows]} if logits else {}
                ledger.record(rows if ids is None else [ids[i] for i in rows], losses, **more)
    return path


def sorted_columns(found, *names):
    table = found.table.sort_by("id")
    return [np.array(table[name].to_pylist()) for name in names]


def calibration_error(probabilities, wrong, bins=10):
    places = np.minimum((probabilities * bins).astype(int), bins - 1)
    return sum(
        abs(probabilities[places == i].mean() - wrong[places == i].mean()) * (places == i).mean()
        for i in set(places)
    )


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    data = digits(0.1, seed=1)
    return data, train(tmp_path_factory.mktemp("noisy") / "ledger", data)


class TestDigits:
    @pytest.mark.parametrize("share", [0.1, 0.2])
    def test_wrong_labels_are_found(self, tmp_path, share):
        data = digits(share, seed=2)
        found = find_issues(train(tmp_path, data, seed=2))
        flagged, probability = sorted_columns(found, "flagged", "probability")
        precision, recall = data.wrong[flagged].mean(), flagged[data.wrong].mean()
        assert precision > 0.85, (precision, recall)
        assert recall > 0.85, (precision, recall)
        assert abs(found.wrong / data.wrong.sum() - 1) < 0.25, found
        assert found.interval[0] <= data.wrong.sum() <= found.interval[1], found
        assert calibration_error(probability, data.wrong) < 0.03
        assert found.statistic == "margin"

    def test_suggested_labels(self, noisy):
        data, path = noisy
        found = find_issues(path)
        flagged, kinds, suggested, confidence, given = sorted_columns(
            found, "flagged", "kind", "suggested_label", "confidence", "given_label"
        )
        assert (given == data.given.numpy()).all()
        chosen = flagged & (kinds == "wrong label")
        right = (suggested == data.true)[chosen]
        assert chosen.sum() > 80
        assert right.mean() > 0.85
        assert abs(confidence[chosen].astype(float).mean() - right.mean()) < 0.1
        assert (suggested != given).all()

    def test_losses_alone(self, tmp_path):
        data = digits(0.2, seed=3)
        found = find_issues(train(tmp_path, data, logits=False))
        (flagged,) = sorted_columns(found, "flagged")
        assert data.wrong[flagged].mean() > 0.75
        assert flagged[data.wrong].mean() > 0.85
        assert (found.statistic, set(found.flagged["kind"].to_pylist())) == ("loss", {"outlier"})
        assert any("losses alone" in note for note in found.notes)
        assert found.table["suggested_label"].null_count == len(found)

    @pytest.mark.parametrize(
        ("scale", "shift", "statistic"), [(1.0, 0.0, "loss"), (1000.0, -5.0, "excess")]
    )
    def test_losses_of_any_sign_and_scale(self, tmp_path, scale, shift, statistic):
        """Neither an example without any loss nor the scale of a domain spoils the others."""
        data = digits(0.1, seed=3, count=600)
        train(tmp_path / "plain", data, logits=False)
        with Ledger(tmp_path / "scaled") as ledger:
            for rows in visits_of(tmp_path / "plain"):
                ids, losses = (np.array([row[name] for row in rows]) for name in ("id", "loss"))
                losses = np.where(ids % 2, scale, 1.0) * np.where(ids == 0, 0.0, losses) + shift
                domains = ["ab"[one % 2] for one in ids]
                ledger.record(ids.tolist(), torch.tensor(losses), domains=domains)
        found = find_issues(tmp_path / "scaled")
        (flagged,) = sorted_columns(found, "flagged")
        assert found.statistic == statistic
        assert flagged[data.wrong].mean() > 0.8
        assert data.wrong[flagged].mean() > 0.7
        assert any("losses alone" in note for note in found.notes)

    def test_labels_given_later(self, tmp_path):
        """With predictions on record, labels may be passed instead of recorded."""
        data = digits(0.1, seed=4)
        path = train(tmp_path, data)
        known = find_issues(path)
        bare = tmp_path / "bare"
        with Ledger(bare) as ledger:
            torch.manual_seed(0)
            replay(path, ledger)
        found = find_issues(bare, labels=data.given)
        assert len(set(found.ids()) ^ set(known.ids())) <= 15
        by_id = find_issues(bare, labels=dict(enumerate(data.given.tolist())))
        assert by_id.ids() == found.ids()

    def test_clean_data(self, tmp_path):
        found = find_issues(train(tmp_path, digits(0.0, seed=5)))
        assert found.flagged_count < 20
        assert found.wrong < 40

    def test_clean_data_by_losses_alone(self, tmp_path):
        """Hard is not wrong: hardly any example is worse off than at the start."""
        found = find_issues(train(tmp_path, digits(0.0, seed=5), logits=False))
        assert found.flagged_count < 20
        assert found.wrong < 40

    @pytest.mark.parametrize("logits", [True, False])
    def test_right_and_wrong_that_overlap(self, tmp_path, logits):
        """Noisy images: few stand out, but their number is still about right."""
        data = digits(0.2, seed=12)
        data.x += 0.45 * torch.randn(data.x.shape)
        found = find_issues(train(tmp_path, data, epochs=8, logits=logits))
        flagged, probability = sorted_columns(found, "flagged", "probability")
        assert 0.6 < found.wrong / data.wrong.sum() < 1.5, found
        assert found.interval[0] <= data.wrong.sum() <= found.interval[1], found
        assert probability.sum() == pytest.approx(found.wrong, abs=1)
        assert calibration_error(probability, data.wrong) < 0.15
        assert data.wrong[flagged].mean() > 0.6
        ordered = found.table["probability"].to_pylist()
        assert ordered == sorted(ordered, reverse=True)

    @pytest.mark.parametrize("start", [0, 1, 3])
    def test_huge_losses_at_the_start_do_not_matter(self, tmp_path, start):
        """As with CTC, whose losses fall tenfold within the first epochs."""
        draw, wrong = np.random.default_rng(0), np.arange(200) < 20
        with Ledger(tmp_path) as ledger:
            for epoch in range(30):
                learned = np.where(wrong, 5.0, 0.3) if epoch > 5 else 6.0
                mean = draw.uniform(0, 600, 200) if epoch < start else learned
                losses = mean * draw.uniform(0.5, 2.0, 200)
                for rows in np.split(draw.permutation(200), 10):
                    ledger.record(rows, losses[rows])
        found = find_issues(tmp_path)
        assert set(found.ids()) == set(range(20))

    def test_a_clipper_that_keeps_the_gradient(self, tmp_path):
        data = digits(0.2, seed=6, count=400)
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

        def losses(rows):
            return F.cross_entropy(model(data.x[rows]), data.given[rows], reduction="none")

        with Ledger(tmp_path) as ledger:
            clipper = Clipper(model, 1, rule=microclip.rules.Keep(), ledger=ledger)
            for _ in range(8):
                for rows in torch.randperm(400).split(40):
                    optimizer.zero_grad()
                    clipper.backward(losses, rows, ids=rows)
                    optimizer.step()
        (flagged,) = sorted_columns(find_issues(tmp_path), "flagged")
        assert data.wrong[flagged].mean() > 0.7
        assert flagged[data.wrong].mean() > 0.7


def visits_of(path):
    """Return the rows of each step of a ledger."""
    from microclip.ledger import open_ledger

    steps = {}
    for batch in open_ledger(path).examples():
        for row in batch.to_pylist():
            steps.setdefault(row["step"], []).append(row)
    return steps.values()


def replay(path, ledger):
    """Record the likeliest class of a ledger's visits, without labels."""
    for rows in visits_of(path):
        logits = torch.full((len(rows), CLASSES), -20.0)
        for place, row in enumerate(rows):
            logits[place, row["label"]] = np.log(max(row["label_probability"], 1e-9))
            logits[place, row["other"]] = np.log(max(row["other_probability"], 1e-9))
        losses = torch.tensor([row["loss"] for row in rows])
        ledger.record([row["id"] for row in rows], losses, logits=logits)


class TestResult:
    def test_the_worst_come_first(self, noisy):
        found = find_issues(noisy[1])
        assert found.table["probability"].to_pylist() == pytest.approx(
            sorted(found.table["probability"].to_pylist(), reverse=True)
        )
        row = found.table.slice(0, 1).to_pylist()[0]
        assert row["flagged"]
        assert "the model preferred another class at " in row["evidence"]
        assert f"mostly {row['suggested_label']}" in row["evidence"]
        assert f"{found.flagged_count} of 1000 examples flagged" in repr(found)
        assert set(found.table["kind"].to_pylist()) <= {None, *KINDS}

    def test_threshold(self, noisy):
        few, many = (find_issues(noisy[1], threshold=t) for t in (0.99, 0.1))
        assert 0 < few.flagged_count < many.flagged_count
        assert few.wrong == many.wrong
        for wrong in (0, "0.5", True):
            with pytest.raises(ValueError, match=f"above 0 and at most 1, but got {wrong!r}"):
                find_issues(noisy[1], threshold=wrong)

    def test_kept_ids(self, noisy, tmp_path):
        found = find_issues(noisy[1])
        kept = found.kept_ids()
        assert set(kept) | set(found.ids()) == set(range(1000))
        assert not set(kept) & set(found.ids())
        assert found.kept_ids(all_ids=range(1001)) == [*kept, 1000]
        found.to_kept_ids(tmp_path / "kept.json")
        assert json.loads((tmp_path / "kept.json").read_text()) == kept

    def test_files(self, noisy, tmp_path):
        found = find_issues(noisy[1])
        found.to_csv(tmp_path / "issues.csv")
        with open(tmp_path / "issues.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [int(row["id"]) for row in rows] == found.table["id"].to_pylist()
        found.to_parquet(tmp_path / "issues.parquet")
        assert pq.read_table(tmp_path / "issues.parquet").equals(found.table)

    def test_hostile_ids_do_nothing_in_a_spreadsheet(self, tmp_path):
        data = digits(0.1, seed=7, count=100)
        ids = [f"=HYPERLINK({i})" for i in range(100)]
        find_issues(train(tmp_path / "run", data, epochs=4, ids=ids)).to_csv(tmp_path / "x.csv")
        assert "\n\"'=HYPERLINK(" in (tmp_path / "x.csv").read_text()

    def test_cleanlab_columns(self, noisy):
        data, path = noisy
        found = find_issues(path)
        table = found.cleanlab_table()
        names = ["id", "is_label_issue", "label_score", "given_label", "predicted_label"]
        assert table.column_names == names
        assert table["id"].to_pylist() == list(range(1000))
        assert table["given_label"].to_pylist() == data.given.tolist()
        scores = np.array(table["label_score"].to_pylist())
        assert scores[data.wrong].mean() < 0.2 < 0.8 < scores[~data.wrong].mean()
        predicted = np.array(table["predicted_label"].to_pylist())
        assert (predicted == data.true).mean() > 0.9

    def test_pandas(self, noisy):
        found = find_issues(noisy[1])
        try:
            import pandas  # noqa: F401
        except ImportError:
            with pytest.raises(ImportError, match="pip install pandas"):
                found.to_pandas()
        else:
            assert len(found.to_pandas()) == 1000


class TestKinds:
    """Histories made by hand: 100 examples that are learned, and one that is not."""

    def ledger(self, path, odd, steps=12):
        """`odd` gives the loss, label probability and other class of the odd one at a step."""
        speed = np.random.default_rng(0).uniform(0.2, 1.0, 100)
        with Ledger(path) as ledger:
            for step in range(steps):
                sure = 1 - 0.7 * np.exp(-step * speed)
                loss, own, other = odd(step)
                logits = np.log(np.stack([sure, (1 - sure) * 0.7, (1 - sure) * 0.3], 1))
                rest = [0.0, 0.0, 0.0]
                rest[0], rest[other] = own, (1 - own) * 0.9
                rest[3 - other] = (1 - own) * 0.1
                logits = np.concatenate([logits, [np.log(np.array(rest))]])
                losses = np.concatenate([-np.log(sure), [loss]])
                ledger.record(
                    list(range(101)),
                    torch.tensor(losses),
                    logits=torch.tensor(logits),
                    labels=[0] * 101,
                )
        return path

    def of_odd(self, path):
        with pytest.warns(UserWarning, match="positions in the mini-batch"):  # they are not
            found = find_issues(path)
        return next(row for row in found.table.to_pylist() if row["id"] == 100)

    def test_wrong_label(self, tmp_path):
        row = self.of_odd(self.ledger(tmp_path, lambda step: (4.0, 0.01, 2)))
        assert (row["kind"], row["suggested_label"], row["learned"]) == ("wrong label", 2, 0)
        assert "at 12 of 12 visits, mostly 2" in row["evidence"]

    def test_outlier(self, tmp_path):
        """No other class is any better."""
        row = self.of_odd(self.ledger(tmp_path, lambda step: (4.0, 0.01, 1 + step % 2)))
        assert row["kind"] in ("outlier", "wrong label")
        assert row["confidence"] == pytest.approx(0.5, abs=0.05)

    def test_not_finite(self, tmp_path):
        row = self.of_odd(self.ledger(tmp_path, lambda step: (np.nan, 0.9, 1)))
        assert (row["kind"], row["probability"], row["flagged"]) == ("not finite", 1.0, True)
        assert "NaN or inf at 12 of 12 visits" in row["evidence"]

    def test_forgotten_often(self, tmp_path):
        row = self.of_odd(self.ledger(tmp_path, lambda step: (0.5, 0.8 if step % 2 else 0.3, 1)))
        assert (row["kind"], row["forgotten"], row["learned"]) == ("forgotten often", 5, 6)
        assert "forgotten 5 times in 12 visits" in row["evidence"]

    def test_never_learned(self, tmp_path):
        row = self.of_odd(self.ledger(tmp_path, lambda step: (0.75, 0.47, 1)))
        assert (row["kind"], row["flagged"]) == ("never learned", False)


class TestBadInput:
    def test_no_loss_per_example(self, tmp_path):
        model = torch.nn.Linear(2, 1)
        with Ledger(tmp_path) as ledger:
            clipper = Clipper(model, 2, ledger=ledger)
            clipper.backward(lambda x: model(x).square().mean(), torch.randn(8, 2), ids=range(8))
        with pytest.raises(ValueError, match="needs a loss per example.*losses of micro-batches"):
            find_issues(tmp_path)

    def test_positions_in_the_batch(self, tmp_path):
        """What a Clipper records if nobody passes ids."""
        with Ledger(tmp_path) as ledger:
            for _ in range(5):
                ledger.record(range(32), torch.rand(32) + 0.1)
        with pytest.warns(UserWarning, match="positions in the mini-batch, not examples.*with_ids"):
            find_issues(tmp_path)

    def test_positions_with_a_smaller_last_batch(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            for size in (32, 32, 20) * 4:
                ledger.record(range(size), torch.rand(size) + 0.1)
        with pytest.warns(UserWarning, match="ids 0 to 31 start anew in every one of the 12 steps"):
            find_issues(tmp_path)

    def test_a_clipper_without_ids(self, tmp_path):
        model, x = torch.nn.Linear(4, 3), torch.randn(90, 4)
        with Ledger(tmp_path) as ledger:
            clipper = Clipper(model, 1, rule=microclip.rules.Keep(), ledger=ledger)
            for rows in torch.arange(90).split(30) * 3:
                model.zero_grad()
                clipper.backward(lambda rows: model(x[rows]).square().sum(1), rows)
        with pytest.warns(UserWarning, match="positions in the mini-batch, not examples"):
            find_issues(tmp_path)

    @pytest.mark.parametrize("labels", [lambda one: 0, (0 for _ in range(9))])
    def test_labels_that_cannot_be_looked_up(self, noisy, labels):
        with pytest.raises(TypeError, match="labels must be a mapping from ids to classes, or a s"):
            find_issues(noisy[1], labels)

    def test_no_ledger(self):
        with pytest.raises(TypeError, match="ledger must be a folder, .* got an object of type N"):
            find_issues(None)

    def test_all_ids_may_be_a_tensor(self, noisy):
        found = find_issues(noisy[1])
        assert found.kept_ids(torch.arange(1000)) == found.kept_ids(range(1000))

    def test_no_ids_at_all(self, tmp_path):
        said = "ids must hold one entry per example, but got None"
        with Ledger(tmp_path) as ledger, pytest.raises(ValueError, match=said):
            ledger.record(None, torch.rand(3))

    @pytest.mark.filterwarnings("ignore:The ids 0 to")
    def test_positions_whose_labels_change(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            for step in range(5):
                labels = (torch.arange(32) + step) % 3
                ledger.record(range(32), torch.rand(32), logits=torch.rand(32, 3), labels=labels)
        with pytest.raises(ValueError, match="32 of the 32 ids.*had different labels"):
            find_issues(tmp_path)

    def test_a_single_epoch(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            for step in range(4):
                ledger.record(range(step * 10, step * 10 + 10), torch.rand(10))
        with pytest.raises(ValueError, match="seen only once.*Record at least 4 epochs"):
            find_issues(tmp_path)

    def test_few_epochs(self, tmp_path):
        data = digits(0.1, seed=8, count=300)
        found = find_issues(train(tmp_path, data, epochs=2))
        assert any("seen at most 2 times" in note for note in found.notes)

    def test_few_examples(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            for _ in range(4):
                ledger.record(list("abc"), torch.rand(3))
        with pytest.raises(ValueError, match="3 are too few: it needs 20"):
            find_issues(tmp_path)

    def test_a_class_seen_once(self, tmp_path):
        data = digits(0.1, seed=9, count=300)
        data.given[data.given == 7] = 3
        data.given[17] = 7
        found = find_issues(train(tmp_path, data))
        assert "Class 7 has a single example, which cannot be judged." in found.notes
        row = next(row for row in found.table.to_pylist() if row["id"] == 17)
        assert (row["probability"], row["flagged"]) == (None, False)

    def test_every_class_seen_once(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            for _ in range(4):
                for rows in torch.randperm(60).split(30):
                    ledger.record(rows, torch.rand(30), logits=torch.rand(30, 60), labels=rows)
        with pytest.raises(ValueError, match="Only 0 of 60 examples can be judged.*alone in their"):
            find_issues(tmp_path)

    @pytest.mark.parametrize(("some", "statistic"), [(40, "loss"), (80, "margin")])
    def test_predictions_of_some_examples(self, tmp_path, some, statistic):
        torch.manual_seed(0)
        with Ledger(tmp_path) as ledger:
            for _ in range(4):
                for start in (0, 100):
                    rows = torch.arange(start, start + 100)
                    losses = torch.rand(100) + 0.1
                    ledger.record(rows[:some], losses[:some], logits=torch.randn(some, 3),
                                  labels=rows[:some] % 3)  # fmt: skip
                    ledger.record(rows[some:], losses[some:])
        found = find_issues(tmp_path)
        assert found.statistic == statistic
        said = any("40 examples cannot be judged" in note for note in found.notes)
        assert said == (statistic == "margin")

    def test_equal_losses(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            for _ in range(4):
                for start in (1, 31):
                    ledger.record(range(start, start + 30), torch.full((30,), 0.7))
        with pytest.raises(ValueError, match="All examples have the same loss"):
            find_issues(tmp_path)

    def test_no_finite_loss(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            for _ in range(4):
                for start in (1, 31):
                    ledger.record(range(start, start + 30), torch.full((30,), torch.nan))
        with pytest.raises(ValueError, match="Most losses in this ledger are NaN or inf"):
            find_issues(tmp_path)

    def test_some_nan_losses(self, tmp_path):
        data = digits(0.1, seed=10, count=300)
        data.x[5] = torch.nan
        with pytest.raises(ValueError, match="Most losses"):
            find_issues(train(tmp_path / "all", data))  # it spoils the model for all
        data.x[5] = 0
        with Ledger(tmp_path / "one") as ledger:
            for _ in range(4):
                for rows in torch.randperm(300).split(50):
                    losses = torch.rand(50) + 0.1
                    losses[rows == 5] = torch.inf
                    ledger.record(rows, losses)
        found = find_issues(tmp_path / "one")
        row = found.table.slice(0, 1).to_pylist()[0]
        assert (row["id"], row["kind"], row["nonfinite"]) == (5, "not finite", 4)

    def test_recorded_labels_out_of_range(self, tmp_path):
        data = digits(0.1, seed=11, count=300)
        torch.manual_seed(0)
        with Ledger(tmp_path) as ledger:
            for _ in range(4):
                for rows in torch.randperm(300).split(50):
                    labels = data.given[rows]
                    labels[rows == 5], labels[rows == 6] = 12, -100
                    logits = F.one_hot(data.given[rows], 10) * 3.0 + torch.randn(50, 10)
                    ledger.record(rows, torch.rand(50), logits=logits, labels=labels)
        found = find_issues(tmp_path)
        rows = {row["id"]: row for row in found.table.to_pylist()}
        assert rows[5]["evidence"] == "its label 12 is none of the 10 classes"
        assert rows[5]["flagged"]
        assert (rows[6]["given_label"], rows[6]["probability"]) == (None, None)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda labels: labels[:-1], "labels has no label for the example 999"),
            (lambda labels: {5: 1}, "labels has no label for the example"),
            (lambda labels: [99, *labels[1:]], "label 99 of the example 0 is out of range.*10"),
            (lambda labels: [-1, *labels[1:]], "label -1 of the example 0 is out of range"),
            (lambda labels: ["cat"] * 1000, "label 'cat' of the example .* is not a whole number"),
            (lambda labels: [0.9] * 1000, "label '0.9' of the example .* is not a whole number"),
            (lambda labels: [np.nan] * 1000, "label 'nan' of the example .* not a whole number"),
            (lambda labels: np.eye(1000), "of the example .* is not a whole number. Pass the num"),
            (
                lambda labels: [(labels[0] + 1) % 10, *labels[1:]],
                "differ from those on record for 1 of the 1000 examples: 0 has",
            ),
        ],
    )
    def test_given_labels_that_do_not_fit(self, noisy, change, message):
        data, path = noisy
        with pytest.raises(ValueError, match=message):
            find_issues(path, labels=change(data.given.tolist()))

    def test_given_labels_that_are_those_on_record(self, noisy):
        data, path = noisy
        for labels in (data.given, data.given.double().numpy()):
            assert find_issues(path, labels=labels).ids() == find_issues(path).ids()

    def test_nothing_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="There is no ledger at"):
            find_issues(tmp_path / "none")


class TestMixture:
    def test_two_populations(self):
        draw = np.random.default_rng(0)
        wrong = np.arange(2000) < 300
        values = draw.normal(np.where(wrong, 3.0, -2.0), 1.2)
        found, (low, high) = mixture.fit(values, mixture.Bounds(0.0, mirrored=True))
        assert found.right == pytest.approx(-2.0, abs=0.1)
        assert found.wrong == pytest.approx(3.0, abs=0.2)
        assert low < 0.15 < high
        assert calibration_error(found.probability(values), wrong) < 0.01

    def test_one_population(self):
        values = np.random.default_rng(0).normal(-3.0, 1.0, 2000)
        found, (low, high) = mixture.fit(values, mixture.Bounds(0.0, mirrored=True))
        assert found.probability(values).sum() < 3
        assert low < high < 0.005

    def test_probability_rises_with_the_number(self):
        values = np.concatenate([np.random.default_rng(0).normal(m, 1, 100) for m in (-3, 2)])
        found, _ = mixture.fit(values, mixture.Bounds(-np.inf, mirrored=False))
        assert (np.diff(found.probability(np.linspace(-9, 9, 50))) >= 0).all()
        assert np.isnan(found.probability(np.array([np.nan]))).all()

    @pytest.mark.parametrize("share", [0.02, 0.2, 0.45])
    def test_a_share_that_is_known(self, share):
        draw = np.random.default_rng(0)
        wrong = draw.random(4000) < share
        for apart in (1.0, 3.0):
            values = draw.normal(apart * wrong, 1.0)
            found = mixture.fit_share(values, share)
            probability = found.probability(values)
            assert probability.mean() == pytest.approx(share, rel=0.02)
            assert found.separation == pytest.approx(apart, abs=1.2)
            assert calibration_error(probability, wrong) < 0.05


class TestVotes:
    def votes(self, *rows):
        found = Votes()
        examples, classes, probabilities = (np.array(x) for x in zip(*rows, strict=True))
        found.add(examples, classes, probabilities)
        return found

    def test_winners(self):
        votes = self.votes((0, 3, 0.2), (0, 5, 0.3), (0, 3, 0.4), (2, 1, 0.5))
        chosen, shares = votes.winners(3)
        assert chosen.tolist() == [3, -1, 1]
        assert shares == pytest.approx([2 / 3, np.nan, 1.0], nan_ok=True)

    def test_contested(self):
        """Class 0 usually has (0.9 + 0.7 + 0.2) / 3 = 0.6, class 1 has 0.8."""
        votes = self.votes(
            *((0, 0, 0.9), (0, 1, 0.1), (1, 0, 0.7), (1, 1, 0.3), (2, 0, 0.2), (2, 1, 0.8)),
            *((3, 1, 0.8), (3, 0, 0.2)),
        )
        labels, visits = np.array([0, 0, 0, 1]), np.ones(4, dtype=np.int64)
        assert votes.contested(labels, visits) == pytest.approx(1 / 4)
        twice = self.votes((0, 0, 0.6), (0, 0, 0.8), (1, 0, 0.7))
        assert twice.contested(np.array([0, 0, -1]), np.array([2, 1, 0])) == 0

    def test_what_is_unsure_counts_in_proportion(self):
        """Of four with label 0, one is confident of it, one of class 1, two of nothing."""
        votes = self.votes(
            *((0, 0, 1.0), (1, 0, 0.0), (1, 1, 0.9), (2, 0, 0.3), (3, 0, 0.3)),
            *((4, 1, 0.9), (5, 1, 0.9)),
        )
        labels = np.array([0, 0, 0, 0, 1, 1])
        assert votes.contested(labels, np.ones(6, dtype=np.int64)) == pytest.approx(2 / 6)

    def test_no_labels(self):
        votes = self.votes((0, 1, 0.5))
        assert np.isnan(votes.contested(np.array([-1]), np.array([1])))
        assert np.isnan(Votes().contested(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)))


class TestCommand:
    def test_prints_the_worst_and_writes_files(self, noisy, tmp_path, capsys):
        _, path = noisy
        files = ["--csv", str(tmp_path / "a.csv"), "--keep", str(tmp_path / "kept.txt")]
        assert cli.main(["issues", str(path), *files, "--top", "3"]) == 0
        said = capsys.readouterr().out
        found = find_issues(path)
        assert f"{found.flagged_count} of 1,000 examples are flagged." in said
        assert f"About {found.wrong} are wrong: between" in said
        assert "wrong label" in said
        assert len((tmp_path / "a.csv").read_text().splitlines()) == 1001
        kept = (tmp_path / "kept.txt").read_text().split()
        assert kept == [str(one) for one in found.kept_ids()]

    def test_the_folder_around_a_ledger(self, noisy, capsys):
        assert cli.main(["issues", str(noisy[1].parent)]) == 0
        assert "examples are flagged" in capsys.readouterr().out

    def test_doubts_come_first(self, tmp_path, capsys):
        with Ledger(tmp_path) as ledger:
            for _ in range(5):
                ledger.record(range(32), torch.rand(32) + 0.1)
        assert cli.main(["issues", str(tmp_path)]) == 0
        said = capsys.readouterr()
        assert said.out.startswith("Warning: The ids 0 to 31 start anew in every one of the 5")
        assert said.err == ""

    def test_mistakes(self, tmp_path, capsys):
        assert cli.main(["issues", str(tmp_path / "none")]) == 1
        assert "There is no ledger at" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            cli.main(["issues"])
        assert "run" in capsys.readouterr().err.lower()


class TestBenchmark:
    """Its measures, by hand, and a record of every kind through its tables."""

    def test_measures(self):
        pytest.importorskip("microclip_lab", reason="it has the benchmark's tasks")
        from find_issues_trial import calibration_error, cut, ranking

        wrong = np.array([True, False, True, False])
        assert ranking(np.array([4.0, 3.0, 1.0, 2.0]), wrong) == {
            "auroc": 0.5,
            "precision at the true number": 0.5,
        }
        probability = np.array([0.9, 0.9, 0.2, 0.2])
        assert calibration_error(probability, wrong) == pytest.approx((0.4 + 0.3) / 2)
        found = cut(np.array([0]), probability, 3, wrong, (1, 2))
        assert (found["precision"], found["recall"], found["covers"]) == (1.0, 0.5, True)
        assert not cut(np.array([0]), probability, 3, wrong, (3, 9))["covers"]
        assert ranking(probability, ~wrong & wrong) == {}

    def test_tables(self):
        pytest.importorskip("microclip_lab", reason="it has the benchmark's tasks")
        from find_issues_table import tables

        method = {"auroc": 0.9, "precision at the true number": 0.8, "precision": 0.7,
                  "recall": 0.6, "estimated": 12, "flagged": 11, "covers": True,
                  "calibration": 0.01}  # fmt: skip
        rival = {"auroc": 0.8, "precision at the true number": 0.7}
        points = {"plain": 90.0, "without the flagged": 91.0, "without the truly wrong": 92.0}
        records = [
            {"task": "digits-10", "seed": seed, "factor": 1.0, "examples": 100, "wrong": 10,
             "methods": {"microclip, predictions": method, "loss in the last epoch": rival},
             "points": points}
            for seed in range(2)
        ]  # fmt: skip
        text = tables(records, [])
        assert "10 % of 100; 2 seeds) | microclip, predictions | 0.900 ± 0.000 | 0.800" in text
        assert "| 1.20 ± 0.00 (2 of 2) |" in text
        assert "+0.1000 ± 0.0000 | +0.100 ± 0.000" in text
        assert "| 90.00 ± 0.00 | +1.00 ± 0.00 | - | +2.00 ± 0.00 |" in text
