"""Rules that weight examples, on record: weights and notes in the ledger, in the evidence about
every example, for the guard, and on the page.
"""

import math
import warnings

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import microclip
from microclip import Clipper, Ledger, draggers, guard
from microclip.draggers.source import Source, WeightReader, whole_steps
from microclip.draggers.statistics import NEVER, HeldBack
from microclip.ledger import open_ledger
from microclip.report import RunFolder
from microclip.report.blocks import Figure, Gallery, Table
from microclip.report.comparison import compare, verdicts
from microclip.report.runs import read_run
from microclip.rules import LossHistory, Unit

from ledger_steps import table
from ledgers import Row, outcome, write
from report_runs import blocks, page_of, said

EXAMPLES, BATCH, EPOCHS = 160, 32, 30
WRONG = 24


def train(ledger, microbatch_size=None, clip=None, domains=None):
    """Train on four clusters of points; the first labels are wrong. Return all outcomes."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(EXAMPLES) % 4
    centers = 3 * torch.randn(4, 8, generator=generator)
    x = centers[truth] + torch.randn(EXAMPLES, 8, generator=generator)
    y = truth.clone()
    y[:WRONG] = (y[:WRONG] + 1) % 4
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = LossHistory(EPOCHS * EXAMPLES // BATCH, clip=clip)
    clipper = Clipper(model, microbatch_size, rule=rule, ledger=ledger)

    def loss_fn(batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    found = []
    for _ in range(EPOCHS):
        for rows in torch.randperm(EXAMPLES, generator=generator).split(BATCH):
            optimizer.zero_grad()
            given = None if domains is None else [domains(int(row)) for row in rows]
            found.append(clipper.backward(loss_fn, (x[rows], y[rows]), ids=rows, domains=given))
            optimizer.step()
    assert rule.phase == "holding"
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "ledger"
    with Ledger(path, flush_every=40) as ledger:
        outcomes = train(ledger)
    return path, outcomes


class TestLedger:
    def test_every_weight_is_on_record(self, trained):
        path, outcomes = trained
        recorded = [
            (row["step"], row["id"], row["weight"]) for row in table(open_ledger(path), "examples")
        ]
        given = [
            (one.step, id, weight)
            for one in outcomes
            for id, weight in zip(one.ids[0], one.example_weights.float().tolist(), strict=True)
        ]
        assert recorded == given
        assert any(weight < 0.5 for _, _, weight in recorded)

    def test_so_is_what_the_rule_said(self, trained):
        path, outcomes = trained
        said = [(one.step, note) for one in outcomes for note in one.notes]
        assert len(said) == 2
        assert list(open_ledger(path).notes) == said

    def test_without_such_a_rule_files_have_no_such_column(self, tmp_path):
        write(tmp_path, [[Row([1, 2], 1.0, losses=[0.5, 0.25])]])
        [file] = (tmp_path / "examples").glob("*.parquet")
        assert "weight" not in pq.read_schema(file).names
        record = open_ledger(tmp_path)
        assert [row["weight"] for row in table(record, "examples")] == [None, None]
        assert record.dataset("examples").to_table()["weight"].null_count == 2
        assert record.notes == ()
        assert not Source.open(record).has_example_weights

    def test_a_ledger_that_gets_such_a_rule_later(self, tmp_path):
        """Parts with and without weights, and steps of both kinds in one part."""
        bare = [Row([1, 2], 1.0, losses=[0.5, 0.25])]
        weighted = [Row([1, 2], 1.0, 0.5, losses=[0.5, 0.25], weights=[1.0, 0.0])]
        with Ledger(tmp_path) as ledger:
            ledger.record(outcome(0, bare))
            ledger.flush()
            ledger.record(outcome(1, bare))
            ledger.record(outcome(2, weighted))
        rows = table(open_ledger(tmp_path), "examples")
        assert [row["weight"] for row in rows] == [None, None, None, None, 1.0, 0.0]
        found = {row["id"]: row for row in draggers.score(tmp_path).table.to_pylist()}
        assert (found[2]["held_back"], found[2]["held_back_since"]) == (1, 2)
        assert found[1]["held_back"] == 0

    def test_notes_are_cut_back_with_their_steps(self, tmp_path):
        rows = [Row([1, 2], 1.0, losses=[0.5, 0.25], weights=[1.0, 1.0])]
        with Ledger(tmp_path) as ledger:
            for step in range(10):
                ledger.record(outcome(step, rows, notes=(f"said in step {step}",)))
        with Ledger(tmp_path) as ledger:  # resumed from a checkpoint
            ledger.record(outcome(6, rows, notes=("said again",)))
        notes = open_ledger(tmp_path).notes
        assert notes == (*((step, f"said in step {step}") for step in range(6)), (6, "said again"))

    def test_the_same_note_is_kept_once_over_steps_parts_and_ranks(self, tmp_path):
        rows = [Row([1, 2], 1.0, losses=[0.5, 0.25], weights=[1.0, 1.0])]
        with Ledger(tmp_path, flush_every=2) as ledger:
            for step in range(6):
                for rank in (0, 1):
                    ledger.record(outcome(step, rows, notes=("the same",)), rank=rank)
        assert open_ledger(tmp_path).notes == ((0, "the same"),)

    def test_notes_of_steps_that_are_not_recorded_come_with_the_next(self, tmp_path):
        rows = [Row([1, 2], 1.0, losses=[0.5, 0.25], weights=[1.0, 1.0])]
        with Ledger(tmp_path, every=4) as ledger:
            for step in range(9):
                ledger.record(outcome(step, rows, notes=("new",) if step == 5 else ()))
        assert open_ledger(tmp_path).notes == ((8, "new"),)

    def test_a_note_of_any_length_and_content_leaves_the_checksum_alone(self, tmp_path):
        rows = [Row([1, 2], 1.0, losses=[0.5, 0.25], weights=[1.0, 1.0])]
        note = 'microclip.crc32 \0 "\\ud800' + 100_000 * "ä"
        with Ledger(tmp_path) as ledger:
            ledger.record(outcome(0, rows, notes=(note,)))
        assert open_ledger(tmp_path).notes == ((0, note),)

    def test_other_columns_are_still_refused(self, tmp_path):
        write(tmp_path, [[Row([1, 2], 1.0, losses=[0.5, 0.25])]])
        [file] = (tmp_path / "examples").glob("*.parquet")
        rows = pq.read_table(file).replace_schema_metadata()
        pq.write_table(rows.append_column("wait", rows["loss"]), file)
        with pytest.raises(ValueError, match="does not have the columns of examples"):
            open_ledger(tmp_path)


class TestEvidence:
    def test_by_hand(self):
        held = HeldBack()
        # example 0: never; 1: steps 2 to 4; 2: step 2, released, again from 5 on; 3: only step 5
        held.add(np.array([0, 1, 2]), np.array([1.0, 0.0, 0.4]), np.array([2, 2, 2]), 3)
        held.add(np.array([0, 1, 2]), np.array([0.5, 0.0, 0.9]), np.array([3, 4, 4]), 3)
        held.add(np.array([2, 2, 1, 3]), np.array([0.0, 0.0, 1.0, 0.1]), np.array([6, 5, 5, 5]), 4)
        assert held.times.tolist() == [0, 2, 3, 1]
        assert held.first.tolist() == [NEVER, 2, 2, 5]
        assert held.last.tolist() == [NEVER, 4, 6, 5]
        assert held.since.tolist() == [NEVER, NEVER, 5, 5]

    def test_against_a_plain_count(self, trained):
        path, outcomes = trained
        visits = {}
        for one in outcomes:
            for id, weight in zip(one.ids[0], one.example_weights.tolist(), strict=True):
                visits.setdefault(id, []).append((one.step, weight < 0.5))
        for row in draggers.score(path).table.to_pylist():
            seen = visits[row["id"]]
            steps = [step for step, held in seen if held]
            assert row["held_back"] == len(steps)
            assert row["held_back_first"] == (steps[0] if steps else None)
            assert row["held_back_last"] == (steps[-1] if steps else None)
            streak = None
            for step, held in seen:
                streak = (step if streak is None else streak) if held else None
            assert row["held_back_since"] == streak

    def test_the_wrong_are_held_back(self, trained):
        rows = draggers.score(trained[0]).table.to_pylist()
        held = {row["id"] for row in rows if row["held_back_since"] is not None}
        assert len(held & set(range(WRONG))) >= 0.9 * WRONG
        assert len(held) <= 1.5 * WRONG

    def test_ranking_does_not_depend_on_the_weights(self, tmp_path):
        def steps(weights):
            return [
                [Row([10, 11, 12], 1.0, losses=[0.1, 2.0, 0.5], weights=weights)] for _ in range(4)
            ]

        weighted = draggers.score(write(tmp_path / "weighted", steps([1.0, 0.0, 1.0])))
        bare = draggers.score(write(tmp_path / "bare", steps(None)))
        assert "held_back" not in bare.table.column_names
        kept = ["id", "rank", "score", "appearances", "loss", "excess_loss"]
        assert weighted.table.select(kept) == bare.table.select(kept)

    @pytest.mark.parametrize(("size", "clip"), [(None, None), (8, Unit())])
    def test_mean_weights_are_of_examples(self, tmp_path, size, clip):
        """What a gradient was multiplied by in all, from the definition of the rule."""
        with Ledger(tmp_path) as ledger:
            outcomes = train(ledger, size, clip)
        factors = {}
        for one in outcomes:
            weights = iter(one.example_weights.split([len(ids) for ids in one.ids]))
            for ids, norm in zip(one.ids, one.norms.tolist(), strict=True):
                own = next(weights).tolist()
                for id, weight in zip(ids, own, strict=True):
                    clipped = 1 / norm if clip and any(own) else 1.0
                    factors.setdefault(id, []).append(weight * clipped)
        for row in draggers.score(tmp_path).table.to_pylist():
            mean = sum(factors[row["id"]]) / len(factors[row["id"]])
            assert row["mean_weight"] == pytest.approx(mean, rel=1e-4, abs=1e-6)

    def test_trajectories(self, trained):
        path, outcomes = trained
        found = draggers.trajectories(path, [3])
        given = [
            weight
            for one in outcomes
            for id, weight in zip(one.ids[0], one.example_weights.tolist(), strict=True)
            if id == 3
        ]
        assert found["example_weight"].to_pylist() == pytest.approx(given)

    def test_weights_find_their_micro_batches_whatever_is_read_at_once(self, tmp_path, monkeypatch):
        """Two ranks, micro-batches of different sizes, one without losses, tiny chunks."""
        drawn = np.random.default_rng(0)
        expected = {}
        with Ledger(tmp_path, flush_every=7) as ledger:
            for step in range(400):
                for rank in (0, 1):
                    rows = []
                    for place, size in enumerate(drawn.integers(1, 5, 3)):
                        ids = [f"{step}-{rank}-{place}-{i}" for i in range(size)]
                        weights = [float(w) for w in drawn.choice([0.0, 0.25, 1.0], size)]
                        mean = math.fsum(weights) / size
                        rows.append(Row(ids, 1.0, mean, losses=[1.0] * size, weights=weights))
                        expected |= dict(zip(ids, weights, strict=True))
                    ledger.record(outcome(step, rows), rank=rank)
        source = Source.open(tmp_path)
        reader, found = WeightReader(source), {}
        columns = ("step", "rank", "microbatch", "ids", "weight")
        for chunk in whole_steps(source.microbatches, columns, rows=600):
            weights, factors = reader.read(chunk)
            assert np.allclose(weights, factors)
            names = [name for ids in chunk["ids"].to_pylist() for name in ids]
            found |= dict(zip(names, weights.tolist(), strict=True))
        assert found == expected


class TestGuard:
    def ledger(self, path, hard, domain=False, steps=120):
        """In the second half, examples of "de" have the weight `hard`; norms say nothing."""
        rows = []
        for step in range(steps):
            weight = hard if step >= steps // 2 else 1.0
            if domain:
                rows.append(
                    [
                        Row([0, 1], 1.0, weight, "de", losses=[1.0, 1.0], weights=[weight] * 2),
                        Row([2, 3], 1.0, 1.0, "en", losses=[1.0, 1.0], weights=[1.0] * 2),
                    ]
                )
            else:
                given = [weight, weight, 1.0, 1.0]
                rows.append([Row(range(4), 1.0, sum(given) / 4, losses=[1.0] * 4, weights=given)])
        return write(path, rows)

    @pytest.mark.parametrize("given", [False, True], ids=["domain_of", "domains"])
    def test_a_domain_that_is_held_back(self, tmp_path, given):
        path = self.ledger(tmp_path, hard=0.1, domain=given)
        of = None if given else lambda one: "de" if one < 2 else "en"
        with pytest.warns(guard.DomainWarning, match="The rule holds the domain 'de' back"):
            report = guard.check(path, of)
        [finding] = report.findings
        # 1/2 and then 0.1 / 1.1 of the weight, on average, for half of the examples
        assert finding.ratio == pytest.approx((0.5 + 0.1 / 1.1) / 2 / 0.5)
        assert "50 % of their appearances" in finding.message
        assert ("knows the domains" in finding.message) == given
        shares = {row["domain"]: row["held_back"] for row in report.domains.to_pylist()}
        assert shares == {"de": 0.5, "en": 0.0}

    def test_equal_weights_are_no_finding(self, tmp_path):
        path = self.ledger(tmp_path, hard=1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = guard.check(path, lambda one: one % 2)
        assert not report.findings
        assert report.domains["ratio"].to_pylist() == pytest.approx([1.0, 1.0])

    def test_a_run_whose_wrong_labels_all_come_from_one_source(self, tmp_path):
        def source(row):
            return "scans" if row < 32 else "photos"  # 24 of these 32 labels are wrong

        with Ledger(tmp_path) as ledger:
            train(ledger)
        with pytest.warns(guard.DomainWarning, match="'scans'"):
            report = guard.check(microclip.ledger.open_ledger(tmp_path), source)
        assert [finding.domain for finding in report.findings] == ["scans"]


class TestPage:
    def run(self, path, steps=60, released=(), notes=True):
        """Write a run in which 0 to 5 are held back from step 20 on, some of them not to the end.

        The labels of 0 to 4 are wrong, and that of 11.
        """
        run = RunFolder(path, seed=0, settings={"rule": "LossHistory"})
        with Ledger(run.ledger) as ledger:
            for step in range(steps):
                ids = list(range(12)) if step % 2 else list(range(11, -1, -1))
                held = {i for i in range(6) if step >= 20 and not (i in released and step >= 40)}
                weights = [0.0 if i in held else 1.0 for i in ids]
                losses = [3.0 - i / 10 if i < 6 else 0.1 for i in ids]
                row = Row(ids, 1.0, sum(weights) / 12, losses=losses, weights=weights)
                starts = ("The rule starts <here>.",) if step == 20 and notes else ()
                ledger.record(outcome(step, [row], starts))
        for i in range(12):
            is_wrong = i < 5 or i == 11
            run.example(
                i, text=f"the text of {i}", label=i % 2, truth=(i + is_wrong) % 2, domain=i // 6
            )
        return run.path

    def page(self, path, **options):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ids look like positions
            return page_of(self.run(path, **options))

    def test_who_is_held_back_and_since_when(self, tmp_path):
        page = self.page(tmp_path, released=(4, 5))
        titles = [section.title for section in page.sections]
        assert titles[1:4] == ["Held back", "Held back now", "Released again"]
        assert page.verdict[0].startswith(
            "The rule holds 4 of 12 examples back after 60 steps, and has released 2 that it held "
            "back before. Of the 4 held back, 4 have a wrong label; 2 wrong labels are not held "
            "back."
        )
        assert "The rule starts <here>." in said(page)
        now, released, _ = blocks(page, Gallery)
        assert [tile.id for tile in now.tiles] == ["0", "1", "2", "3"]
        assert [tile.text for tile in released.tiles] == ["the text of 4", "the text of 5"]
        assert ("since", "step 20") in now.tiles[0].facts
        assert ("held back", "40 times") in now.tiles[0].facts
        assert ("until", "step 39") in released.tiles[0].facts

    def test_the_figure_counts_examples(self, tmp_path):
        page = self.page(tmp_path, released=(4, 5))
        [figure] = [one for one in blocks(page, Figure) if one.key.startswith("held-time")]
        right, wrong = figure.choices[""].data
        assert (right["name"], wrong["name"]) == ("label correct", "label wrong")
        by_step = dict(zip(right["x"], zip(right["y"], wrong["y"], strict=True), strict=True))
        assert by_step[19] == (0, 0)
        assert by_step[20] == by_step[39] == (1, 5)
        assert by_step[40] == by_step[59] == (0, 4)

    def test_domains(self, tmp_path):
        page = self.page(tmp_path, steps=200)
        assert "The rule holds the domain '0' back" in said(page)
        assert "It holds back whole domains: 0. See “Held back”." in page.verdict[0]
        [table] = [one for one in blocks(page, Table) if one.key.startswith("domain-table")]
        place = table.headings.index("% held back now")
        assert {row[0].text: row[place].text for row in table.rows} == {"0": "100.0", "1": "0.0"}

    def test_nothing_was_held_back(self, tmp_path):
        page = self.page(tmp_path, steps=10)
        assert page.verdict[0].startswith("The rule held none of 12 examples back.")
        assert [section.title for section in page.sections][1] == "Held back"
        assert "Held back now" not in [section.title for section in page.sections]

    def test_a_ledger_alone(self, trained):
        page = page_of(trained[0])
        assert page.verdict[0].startswith("The rule holds ")
        assert "LossHistory starts to hold examples back" in said(page)
        assert "Gradients" in [section.title for section in page.sections]

    def test_a_rule_is_a_setting_of_its_own_in_a_comparison(self, tmp_path):
        arms = {
            "plain": (None, {}),
            "b4": (4, {"rule": "MinNorm"}),
            "history": (None, {"rule": "loss-history"}),
            "both": (4, {"rule": "LossHistory(total_steps=80, clip=Unit)"}),
            "alone": (1, {"rule": "LossHistory"}),
        }
        gains = {"plain": 0.0, "b4": 0.0, "history": 0.5, "both": -0.5, "alone": 0.5}
        for name, (b, settings) in arms.items():
            for seed in range(3):
                path = tmp_path / f"{name}-{seed}"
                run = RunFolder(path, microbatch_size=b, seed=seed, settings=settings)
                run.log(1, accuracy=0.1 * seed + gains[name] + 0.001 * seed * (name != "plain"))
        named = [name for name in arms if name != "alone"]
        paths = [tmp_path / f"{name}-{seed}" for name in named for seed in range(3)]
        (found,) = compare([read_run(path) for path in paths])
        both = "LossHistory(clip=Unit()), b = 4"
        names = [setting.name for setting in found.settings]
        assert names == ["plain training", "b = 4", "LossHistory", both]
        sentences = verdicts(found)
        assert [sentence.split(":")[0] for sentence in sentences] == names[1:]
        assert sentences[1].endswith("it helps here.")
        assert sentences[2].endswith("plain training is better here.")
        page = page_of(*paths)
        assert page.sections[0].title == "What helps?"
        (other,) = compare([read_run(tmp_path / f"{n}-0") for n in ("plain", "alone")])
        assert other.settings[1].name == "LossHistory"  # b does not matter for it
