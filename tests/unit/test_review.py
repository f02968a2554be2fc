"""Reviews: reading and refusing them, lists and data sets made from them, and `microclip apply`."""

import json
import re
from collections import namedtuple

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from review_runs import CLASSES, COUNT, WRONG, recorded
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import microclip
from microclip import read_review, with_ids
from microclip.cli import main
from microclip.report.blocks import Suspects
from microclip.report.page import render
from microclip.report.run_data import ids_to_describe

from report_runs import blocks, described, ledger, page_of, said

HEAD = "id,verdict,label\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("run") / "run").path


def written(tmp_path, text, name="review.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


class TestReading:
    def test_verdicts_and_labels(self, tmp_path):
        review = read_review(written(tmp_path, HEAD + "3,keep,\n1,Drop,\n2,relabel,7\n5,,\n"))
        assert dict(review.verdicts) == {3: "keep", 1: "drop", 2: "relabel"}
        assert dict(review.labels) == {2: 7}
        assert review.dropped == [1]
        assert review.kept_ids(range(6)) == [0, 2, 3, 4, 5]
        assert repr(review) == "Review(1 keep, 1 relabel, 1 drop)"

    def test_ids_that_are_no_numbers_are_strings(self, tmp_path):
        review = read_review(written(tmp_path, HEAD + "007,drop,\n8,relabel,cat\n"))
        assert dict(review.verdicts) == {"007": "drop", "8": "relabel"}
        assert dict(review.labels) == {"8": "cat"}

    @pytest.mark.parametrize("delimiter", [",", ";", "\t"])
    def test_what_spreadsheets_make_of_it(self, tmp_path, delimiter):
        text = '\ufeffID,Verdict,Label,notes\r\n1,DROP,,"a, b"\r\n\r\n2,relabel,3,\r\n'
        text = text if delimiter == "," else text.replace("a, b", "a").replace(",", delimiter)
        review = read_review(written(tmp_path, text))
        assert (review.dropped, dict(review.labels)) == ([1], {2: 3})

    def test_formulas_lose_their_apostrophe(self, tmp_path):
        lines = "\"'=1+1\",drop,\n'@x,relabel,'+y\n''=z,drop,\n'quoted',keep,\n"
        review = read_review(written(tmp_path, HEAD + lines))
        assert list(review.verdicts) == ["=1+1", "@x", "'=z", "'quoted'"]
        assert dict(review.labels) == {"@x": "+y"}

    def test_json(self, tmp_path):
        entries = [
            {"id": 2**60 + 1, "verdict": "drop"},
            {"id": 4, "verdict": "relabel", "label": 2},
        ]
        content = {"format": "microclip-review", "version": 1, "reviews": entries}
        for text in (json.dumps(content), json.dumps(entries)):
            review = read_review(written(tmp_path, text, "review.json"))
            assert (review.dropped, dict(review.labels)) == ([2**60 + 1], {4: 2})
        strings = read_review(written(tmp_path, '[{"id": "4", "verdict": "drop"}]'))
        assert strings.dropped == ["4"]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "review.csv is empty: export the review again."),
            (" \n", "is empty"),
            (HEAD, "has no verdicts: review some examples and export them again."),
            (HEAD + "1,,\n", "has no verdicts"),
            ("id,label\n1,2\n", "must have one column 'verdict', but its first line names 'id', "),
            ("id,id,verdict\n", "must have one column 'id'"),
            (HEAD + "1,maybe,\n", "line 2 has the verdict 'maybe' for the example '1', but verdi"),
            (HEAD + "1,relabel,\n", "line 2 relabels the example '1', but has no label."),
            (HEAD + "1,keep\n", "line 2 has 2 values, but there are 3 columns."),
            (
                HEAD + "1,keep,\n2,drop,\n1,drop,\n",
                "the example 1 has two verdicts, keep in line 2 and drop in line 4. Leave only one",
            ),
            (HEAD + "1,relabel,3\n1,relabel,4\n", "two verdicts, relabel 3 in line 2 and relabel"),
            (HEAD + '1,"keep,\n', "is not CSV: unexpected end of data in line 2."),
            ("{", "is damaged"),
            ("[" * 100_000, "is damaged"),
            ("{}", 'does not say "format": "microclip-review": this is not a review.'),
            ('{"format": "microclip-review", "version": 2}', "has version 2, but this microclip"),
            ('{"format": "microclip-review", "version": 1}', "has no list of verdicts."),
            ("[]", "has no verdicts"),
            ("[1]", "entry 1 must be an object with an id, an integer or a string, but is 1."),
            ('[{"id": true}]', "entry 1 must be an object with an id"),
            ('[{"id": 1, "verdict": "relabel", "label": true}]', "the label true, but labels are"),
            ('[{"id": 1, "verdict": "relabel", "label": {"a": 1}}]', 'the label {"a": 1}, but'),
            ('[{"id": 1}]', "entry 1 has the verdict 'none' for the example 1"),
        ],
    )
    def test_what_is_refused(self, tmp_path, text, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            read_review(written(tmp_path, text))

    def test_the_same_verdict_twice_is_one(self, tmp_path):
        assert len(read_review(written(tmp_path, HEAD + "1,drop,\n1,drop,\n"))) == 1

    def test_other_encodings_are_refused(self, tmp_path):
        (tmp_path / "review.csv").write_bytes("id,verdict\né,drop\n".encode("latin-1"))
        with pytest.raises(ValueError, match="is not UTF-8 text .* the right format CSV UTF-8"):
            read_review(tmp_path / "review.csv")


class TestOfARun:
    def test_all_others_are_kept(self, tmp_path, run):
        review = read_review(written(tmp_path, HEAD + "3,drop,\n4,relabel,0\n"), run=run)
        assert review.kept_ids() == [i for i in range(COUNT) if i != 3]
        assert read_review(tmp_path / "review.csv", run / "ledger").kept_ids() == review.kept_ids()
        assert review.kept_ids(torch.arange(COUNT)) == review.kept_ids()

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (
                "999,drop,",
                "1 of the 1 ids in {} is not in the run {}: 999 in line 2. Correct them: ids are ",
            ),
            ("a,drop,\n1,keep,", "1 of the 2 ids in {}: 'a' in line 2. Correct them"),
            ("0.0,drop,", "'0.0' in line 2. Correct them: ids are like 0."),
            ("a,drop,\nb,keep,", "2 of the 2 ids in {}. This is the review of another run."),
            ("1,relabel,9", "gives the example 1 the label 9, but the model of {} has the classes"),
            ("1,relabel,99.0", "gives the example 1 the label 99.0, but the model"),
            ("0,relabel,1\n1,relabel,cat", "gives the example 1 the label cat, but the model"),
            ("0,relabel,cat\n1,relabel,9", "the label cat, but the model"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, tmp_path, run, line, message):
        path = written(tmp_path, HEAD + line + "\n")
        with pytest.raises(ValueError, match=".*".join(map(re.escape, message.split("{}")))):
            read_review(path, run)

    def test_labels_as_pandas_writes_them(self, tmp_path, run):
        path = written(tmp_path, HEAD + "3,relabel,1.0\n4,relabel,0\n")
        assert dict(read_review(path, run).labels) == {3: 1, 4: 0}
        assert dict(read_review(path).labels) == {3: 1, 4: 0}

    def test_numbers_that_are_strings_in_the_run(self, tmp_path):
        path = ledger(tmp_path / "ledger", name=lambda i: f"0{i}")
        review = read_review(written(tmp_path, HEAD + "03,drop,\n"), path)
        assert review.dropped == ["03"]
        assert len(review.kept_ids()) == 23

    def test_without_the_run_the_others_are_unknown(self, tmp_path):
        review = read_review(written(tmp_path, HEAD + "3,drop,\n"))
        with pytest.raises(ValueError, match="knows only the examples that were reviewed"):
            review.kept_ids()
        with pytest.raises(ValueError, match=r"1 of the 1 examples .* for instance 3\. Its ids"):
            review.kept_ids(["3", "4"])


Pair = namedtuple("Pair", "x y")


class Samples(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class TestDataSets:
    def test_a_tensor_data_set(self, tmp_path):
        review = read_review(written(tmp_path, HEAD + "0,drop,\n2,relabel,9\n"))
        dataset = TensorDataset(torch.arange(4.0), torch.tensor([0, 1, 2, 3]))
        cleaned = review.apply(dataset)
        assert cleaned.ids == [1, 2, 3]
        ((x, y),) = DataLoader(cleaned, batch_size=3)
        assert x.tolist() == [1, 2, 3]
        assert y.tolist() == [1, 9, 3]
        assert y.dtype == torch.int64
        kept = Subset(dataset, review.kept_ids(range(len(dataset))))
        assert [int(x) for x, _ in kept] == [1, 2, 3]

    def test_ids_of_the_data_set(self, tmp_path):
        review = read_review(written(tmp_path, HEAD + "b,drop,\nc,relabel,1\n"))
        dataset = with_ids(Samples([(i, 0) for i in range(3)]), ["a", "b", "c"])
        cleaned = review.apply(dataset)
        assert [cleaned[i] for i in range(2)] == [(0, 0, "a"), (2, 1, "c")]
        same = review.apply(Samples([(i, 0) for i in range(3)]), ["a", "b", "c"])
        assert [same[0], same[1]] == [(0, 0), (2, 1)]

    @pytest.mark.parametrize("names", [None, [f"n{i}" for i in range(10)]])
    def test_a_part_of_a_data_set_keeps_its_ids(self, tmp_path, names):
        whole = with_ids(Samples([(i, i % 2) for i in range(10)]), names)
        part = Subset(Subset(whole, [9, 7, 5, 3, 1]), torch.tensor([4, 2, 0]))  # 1, 5, 9
        first, last = ("1", "9") if names is None else ("n1", "n9")
        review = read_review(written(tmp_path, HEAD + f"{first},drop,\n{last},relabel,0\n"))
        cleaned = review.apply(part)
        assert [cleaned[i][:2] for i in range(2)] == [(5, 1), (9, 0)]
        review = read_review(written(tmp_path, HEAD + f"{last},drop,\n"))
        assert review.apply(cleaned).ids == cleaned.ids[:1]

    def test_other_wrappers_of_a_data_set_with_ids_are_refused(self, tmp_path):
        review = read_review(written(tmp_path, HEAD + "1,drop,\n"))
        whole = with_ids(Samples([(i, 0) for i in range(3)]))
        for wrapper in (ConcatDataset([whole, whole]), Subset(ConcatDataset([whole]), [2, 1])):
            with pytest.raises(ValueError, match="The ConcatDataset wraps a data set with ids"):
                review.apply(wrapper)
        assert review.apply(ConcatDataset([whole]), [2, 1, 0]).ids == [2, 0]

    @pytest.mark.parametrize(
        ("sample", "label", "expected"),
        [
            ({"x": 1, "label": 0}, None, {"x": 1, "label": 1}),
            ({"x": 1, "labels": 0}, None, {"x": 1, "labels": 1}),
            ({"x": 1, "class": "a"}, "class", {"x": 1, "class": "1"}),
            ([5, 0], None, [5, 1]),
            ((0, 5), 0, (1, 5)),
            (Pair(5, 0), None, Pair(5, 1)),
        ],
    )
    def test_kinds_of_samples(self, tmp_path, sample, label, expected):
        review = read_review(written(tmp_path, HEAD + "0,relabel,1\n"))
        found = review.apply(Samples([sample]), label=label)[0]
        assert found == expected
        assert type(found) is type(expected)

    def test_numbers_of_numpy_stay_so(self, tmp_path):
        review = read_review(written(tmp_path, HEAD + "0,relabel,1\n"))
        _, label = review.apply(Samples([(0, np.int8(0))]))[0]
        assert (label, type(label)) == (1, np.int8)

    @pytest.mark.parametrize(
        ("sample", "line", "message"),
        [
            ({"x": 1}, "0,relabel,1", "A sample is a dictionary with 'x', and it is unclear where"),
            ({"label": 1, "labels": 1}, "0,relabel,1", "it is unclear where its label is"),
            ((1,), "0,relabel,1", "A sample is a tuple of 1"),
            (torch.zeros(2), "0,relabel,1", "A sample is an object of type Tensor"),
            (
                (0, torch.zeros(3)),
                "0,relabel,1",
                "is of type Tensor of shape (3,). Set",
            ),
            ((0, np.zeros(3), 1), "0,relabel,1", "is of type ndarray of shape (3,). Set"),
            ((0, [0, 1]), "0,relabel,1", "is of type list. Set label= of Review.apply()"),
            ((1, 2), "0,relabel,cat", "The new label 'cat' is text, but the samples have labels"),
        ],
    )
    def test_labels_that_cannot_be_replaced(self, tmp_path, sample, line, message):
        review = read_review(written(tmp_path, HEAD + line + "\n"))
        with pytest.raises(ValueError, match=re.escape(message)):
            review.apply(Samples([sample]))[0]

    def test_ids_that_do_not_fit(self, tmp_path):
        review = read_review(written(tmp_path, HEAD + "9,drop,\n"))
        with pytest.raises(ValueError, match="for instance 9"):
            review.apply(Samples([(0, 0)]))
        with pytest.raises(ValueError, match="there are 1 examples, but 2 ids"):
            review.apply(Samples([(0, 0)]), [8, 9])


class TestTheCommand:
    def test_lists(self, tmp_path, run, capsys):
        path = written(tmp_path, HEAD + "3,drop,\n4,relabel,0\n5,keep,\n")
        out = tmp_path / "cleaned"
        assert main(["apply", str(path), "--run", str(run), "--out", str(out)]) == 0
        said = capsys.readouterr().out
        assert f"3 verdicts: 1 keep, 1 relabel, 1 drop.\n{COUNT - 1} of {COUNT} examples" in said
        assert str(out / "relabel.csv") in said
        kept = (out / "keep.txt").read_text().split()
        assert kept == [str(i) for i in range(COUNT) if i != 3]
        assert (out / "drop.txt").read_text() == "3\n"
        assert pyarrow.csv.read_csv(out / "relabel.csv").to_pylist() == [{"id": 4, "label": 0}]

    def test_other_formats(self, tmp_path, run):
        path = written(tmp_path, HEAD + "3,drop,\n4,relabel,0\n")
        for format in ("json", "parquet"):
            options = ["--run", str(run), "--out", str(tmp_path), "--format", format]
            assert main(["apply", str(path), *options]) == 0
        assert json.loads((tmp_path / "keep.json").read_text())[:4] == [0, 1, 2, 4]
        assert json.loads((tmp_path / "relabel.json").read_text()) == [{"id": 4, "label": 0}]
        assert pq.read_table(tmp_path / "keep.parquet")["id"].to_pylist()[:4] == [0, 1, 2, 4]
        assert pq.read_table(tmp_path / "drop.parquet").to_pylist() == [{"id": 3}]
        assert pq.read_table(tmp_path / "relabel.parquet").to_pylist() == [{"id": 4, "label": 0}]

    def test_without_a_run(self, tmp_path, capsys):
        path = written(tmp_path, HEAD + "3,drop,\n")
        assert main(["apply", str(path), "--out", str(tmp_path)]) == 0
        assert "Without --run, the ids of the other examples are unknown" in capsys.readouterr().out
        assert not (tmp_path / "keep.txt").exists()
        assert (tmp_path / "relabel.csv").read_text().splitlines() == ['"id","label"']

    def test_a_stale_list_to_keep_is_removed(self, tmp_path, run, capsys):
        out = ["--out", str(tmp_path / "out")]
        path = written(tmp_path, HEAD + "3,drop,\n")
        assert main(["apply", str(path), "--run", str(run), *out]) == 0
        assert main(["apply", str(written(tmp_path, HEAD + "4,drop,\n")), *out]) == 0
        assert "keep.txt, which was that of an earlier review, was removed" in (
            capsys.readouterr().out.replace("\n", " ")
        )
        names = [file.name for file in sorted((tmp_path / "out").iterdir())]
        assert names == ["drop.txt", "relabel.csv"]

    def test_a_list_of_ones_own_is_left_alone(self, tmp_path):
        kept = written(tmp_path, "my own", "keep.txt")
        path = written(tmp_path, HEAD + "4,drop,\n")
        assert main(["apply", str(path), "--out", str(tmp_path)]) == 0
        assert kept.read_text() == "my own"

    def test_ids_of_several_lines(self, tmp_path):
        path = ledger(tmp_path / "ledger", name=lambda i: f"{i}\nb")
        review = written(tmp_path, HEAD + '"3\nb",drop,\n')
        options = ["apply", str(review), "--run", str(path), "--out", str(tmp_path / "out")]
        with pytest.raises(SystemExit, match=r"does not fit on a single line.*--format json"):
            main(options)
        assert not (tmp_path / "out").exists()
        assert main([*options, "--format", "json"]) == 0
        assert json.loads((tmp_path / "out" / "drop.json").read_text()) == ["3\nb"]

    def test_ids_of_more_than_64_bits_are_strings(self, tmp_path):
        path = written(tmp_path, HEAD + "7" * 30 + ",relabel,1\n" + "7" * 5000 + ",drop,\n")
        assert main(["apply", str(path), "--out", str(tmp_path)]) == 0
        assert "7" * 30 in (tmp_path / "relabel.csv").read_text()

    @pytest.mark.parametrize("content", ["", HEAD + "1,maybe,\n", HEAD + "999,drop,\n"])
    def test_mistakes_are_one_line(self, tmp_path, run, content, capsys):
        path = written(tmp_path, content)
        with pytest.raises(SystemExit) as error:
            main(["apply", str(path), "--run", str(run), "--out", str(tmp_path / "out")])
        assert str(error.value).startswith("microclip: ")
        assert str(path) in str(error.value)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("inside", ["", "/deep"])
    def test_lists_need_a_folder(self, tmp_path, run, inside, capsys):
        path = written(tmp_path, HEAD + "1,drop,\n")
        assert main(["apply", str(path), "--run", str(run), "--out", f"{path}{inside}"]) == 1
        said = capsys.readouterr().err
        assert f"Cannot write lists to {path}{inside}: it is a file, or a folder above it" in said

    def test_a_file_that_is_not_there(self, tmp_path, capsys):
        assert main(["apply", str(tmp_path / "none.csv")]) == 1
        assert "There is no review at " in (said := capsys.readouterr().err)
        assert "none.csv" in said
        assert main(["apply", str(tmp_path)]) == 1
        assert f"A review is a file, but {tmp_path} is a folder." in capsys.readouterr().err


class TestThePage:
    def test_suspects_come_first(self, run):
        page = page_of(run)
        assert page.sections[0].title == "Suspects"
        issues = microclip.find_issues(run / "ledger")
        low, high = issues.interval
        assert page.headlines == [
            f"{issues.wrong} of 300 labels look wrong (95 %: {low} to {high})"
        ]
        (found,) = blocks(page, Suspects)
        flagged = [row.id for row in found.rows if row.flagged]
        assert flagged == issues.ids()
        assert len(set(flagged) & set(WRONG)) >= 25
        assert f"{len(set(flagged) & set(WRONG))} have a wrong label; 30 wrong labels are" in (
            said(page)
        )
        first = found.rows[0]
        assert (first.given, first.suggested) == (str((first.id + 1) % 3), str(first.id % 3))
        assert found.labels == {str(i): f"{name} ({i})" for i, name in enumerate(CLASSES)}
        assert (found.fixed_labels, found.integer_ids) == (True, True)
        html = render(page).decode()
        assert html.index("labels look wrong") < html.index('id="suspects-1"')
        assert html.index('id="suspects-1"') < html.index('class="verdict" id="summary"')

    def test_plain_training_without_norms_is_not_said_to_be_clipped(self, run):
        page = page_of(run / "ledger")
        titles = [section.title for section in page.sections]
        assert "What clipping did" not in titles
        assert "Plain training: nothing was clipped" in page.verdict[0]
        assert "not finite" not in said(page)

    def test_it_says_why_there_are_none(self, tmp_path):
        page = page_of(ledger(tmp_path / "ledger", steps=1))
        assert page.headlines == []
        assert page.sections[0].title != "Suspects"
        assert "There is no list of suspects. Most examples were seen only once" in said(page)

    def test_no_suspects_where_no_examples_are_wanted(self, run):
        assert blocks(page_of(run, gallery=0), Suspects) == []

    def test_only_what_is_shown_needs_a_description(self, run):
        (found,) = blocks(page_of(run, gallery=5), Suspects)
        needed = ids_to_describe(run / "ledger", 5)
        assert needed >= {row.id for row in found.rows}
        assert len(needed) < COUNT / 2

    def test_several_runs_are_told_apart(self, tmp_path, run):
        other = described(tmp_path / "other")
        page = page_of(run, other.path)
        assert [line.split(":")[0] for line in page.headlines] == ["three classes", "other"]
        keys = {block.storage for block in blocks(page, Suspects)}
        assert len(keys) == 2
        assert [section.title for section in page.sections[:2]] == [
            "Suspects (three classes)",
            "Suspects (other)",
        ]

    def test_labels_without_classes_are_those_of_the_examples(self, tmp_path):
        run = described(tmp_path / "run")
        (found,) = blocks(page_of(run.path), Suspects)
        assert list(found.labels) == [str(i) for i in range(10)]
        assert not found.fixed_labels
        assert found.rows[0].suggested is None
        assert {row.shows for row in found.rows} == {"text"}

    def test_thousands_do_not_make_a_huge_page(self, tmp_path, monkeypatch):
        run = recorded(tmp_path / "run", text="word " * 500)
        from microclip.report import run_data

        monkeypatch.setattr(run_data, "MOST_SUSPECTS", 10)
        page = page_of(run.path)
        (found,) = blocks(page, Suspects)
        assert len(found.rows) == 10
        assert "These are the 10 most probable of" in said(page)
        assert len(found.listed.rows) == 10
