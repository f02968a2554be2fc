"""A folder in SuperGLUE's layout: texts, answers, splits, and errors."""

import json
import re
from collections import Counter

import pytest

from microclip_lab.language.superglue import load
from microclip_lab.language.superglue_tasks import NAMES, TASKS, JsonObject
from microclip_lab.training.config import LayoutError

from superglue_folders import MAKERS, make, write


def only(task, i=1):
    return TASKS[task].examples(JsonObject(MAKERS[task](i), "here"))


class TestForms:
    @pytest.mark.parametrize(
        ("task", "source", "target", "choices"),
        [
            (
                "BoolQ",
                "boolq question: is boat 1 small passage: Boat 1 is small.",
                "True",
                ("True", "False"),
            ),
            (
                "CB",
                "cb hypothesis: boat 1 sinks premise: Ada said that boat 1 sails.",
                "contradiction",
                ("entailment", "contradiction", "neutral"),
            ),
            (
                "COPA",
                "copa choice1: It was painted. choice2: It had a hole. premise: The boat sank. "
                "question: cause",
                "choice2",
                ("choice1", "choice2"),
            ),
            (
                "RTE",
                "rte hypothesis: Boat 1 moved. premise: Boat 1 sailed to Lund.",
                "entailment",
                ("entailment", "not_entailment"),
            ),
            (
                "WiC",
                "wic sentence1: The bank of the river. sentence2: The bank is steep. word: bank",
                "True",
                ("True", "False"),
            ),
            (
                "WSC",
                "wsc: Ada gave *the small boat* to Bo because #it# leaked.",
                "True",
                ("True", "False"),
            ),
        ],
    )
    def test_tasks_with_one_question_per_line(self, task, source, target, choices):
        [example] = only(task)
        assert (example.source, example.target) == (source, target)
        assert example.choices == choices
        assert example.answers == (target,)
        assert example.id == f"{task.lower()}-1"
        assert example.domain == task.lower()

    def test_multirc_asks_for_each_answer_and_remembers_its_question(self):
        examples = only("MultiRC")
        assert [example.target for example in examples] == ["True", *["False"] * 3, "True"]
        assert [example.group for example in examples] == ["multirc-1-0"] * 3 + ["multirc-1-1"] * 2
        assert len({example.id for example in examples}) == 5
        assert examples[1].source == (
            "multirc question: What did Ada build? answer: boat 1 paragraph: Sent 1: Ada built a "
            "small boat. Sent 2: She sailed it to Lund with Bo."
        )

    def test_record_chooses_among_the_entities_of_its_passage(self):
        first, second = only("ReCoRD")
        assert first.choices == ("Ada Berg", "Malmo", "Lund", "Bo", "Ada")  # Lund is there twice
        assert first.answers == ("Ada Berg", "Ada")
        assert second.answers == ("Malmo",)
        assert first.source == (
            "record query: @placeholder sailed to Lund entities: Ada Berg, Malmo, Lund, Bo, Ada "
            "passage: Ada Berg sailed from Malmo to Lund. Bo waited in Lund for the boat. Ada "
            "came late"
        )


class TestFolder:
    def test_all_eight_tasks(self, tmp_path):
        splits = load(make(tmp_path), seed=0)
        sizes = Counter(example.domain for example in splits.training)
        assert set(sizes) == set(NAMES)
        assert sizes["boolq"] == 8
        assert sizes["multirc"] == 8 * 5
        assert sizes["record"] == 8 * 3  # a query with two answers is trained on twice
        assert len({example.id for example in splits.training}) == len(splits.training)

    def test_record_is_trained_on_each_answer_and_judged_once(self, tmp_path):
        splits = load(make(tmp_path, ["ReCoRD"]), seed=0)
        own = [example for example in splits.training if example.id.startswith("record-0-0")]
        assert [example.target for example in own] == ["Ada Berg", "Ada"]
        assert len(splits.validation) == 3 * 2

    def test_val_is_halved_by_lines_whatever_the_seed(self, tmp_path):
        make(tmp_path, ["MultiRC", "RTE"], validation=7)
        one, other = load(tmp_path, seed=0), load(tmp_path, seed=1)
        assert one == other
        lines = [
            {re.match(r"multirc-\d+", e.id)[0] for e in half if e.domain == "multirc"}
            for half in (one.validation, one.test)
        ]
        assert not lines[0] & lines[1]  # no paragraph is in both
        assert [len(half) for half in lines] == [4, 3]
        ids = [e.id for e in (*one.validation, *one.test) if e.domain == "rte"]
        assert sorted(ids) == sorted(f"rte-{i}" for i in range(8, 15))

    def test_some_tasks(self, tmp_path):
        make(tmp_path, ["CB", "WSC", "COPA"])
        (tmp_path / "AX-b").mkdir()  # comes with SuperGLUE, is not trained on
        (tmp_path / "LICENSE.txt").touch()
        assert {e.domain for e in load(tmp_path, seed=0).training} == {"cb", "wsc", "copa"}
        assert {e.domain for e in load(tmp_path, seed=0, wanted=["CB"]).test} == {"cb"}

    def test_large_tasks_are_capped_and_the_others_are_not(self, tmp_path):
        make(tmp_path, ["MultiRC", "CB"])
        chosen = load(tmp_path, seed=0, most=10).training
        assert Counter(e.domain for e in chosen) == {"multirc": 10, "cb": 8}
        assert chosen == load(tmp_path, seed=0, most=10).training
        assert chosen != load(tmp_path, seed=1, most=10).training


class TestWrongLayouts:
    def fails(self, root, *words, **options):
        with pytest.raises(LayoutError) as caught:
            load(root, seed=0, **options)
        for word in ("expected", *words):
            assert word in str(caught.value)

    def test_no_folder(self, tmp_path):
        with pytest.raises(LayoutError, match=r'"vader" or a folder .* is not one'):
            load(tmp_path / "none", seed=0)

    def test_nothing_that_is_known(self, tmp_path):
        self.fails(tmp_path, "BoolQ, CB", "found nothing")

    def test_a_folder_with_another_name(self, tmp_path):
        make(tmp_path, ["CB"])
        (tmp_path / "CB").rename(tmp_path / "CommitmentBank")
        self.fails(tmp_path, "found CommitmentBank", "Rename")

    def test_a_missing_file(self, tmp_path):
        make(tmp_path, ["CB"])
        (tmp_path / "CB" / "val.jsonl").unlink()
        self.fails(tmp_path, "train.jsonl and val.jsonl", "found test.jsonl, train.jsonl")

    def test_a_line_that_is_no_json(self, tmp_path):
        make(tmp_path, ["CB"])
        path = tmp_path / "CB" / "train.jsonl"
        path.write_text(path.read_text() + "\n{'label': 1}\n")
        self.fails(tmp_path, "train.jsonl, line 10", "{'label': 1}")

    def test_a_line_that_is_no_object(self, tmp_path):
        make(tmp_path, ["CB"])
        (tmp_path / "CB" / "train.jsonl").write_text("[1, 2]\n")
        self.fails(tmp_path, "line 1", "JSON object", "[1, 2]")

    def test_an_empty_file(self, tmp_path):
        make(tmp_path, ["CB"])
        (tmp_path / "CB" / "train.jsonl").write_text("")
        self.fails(tmp_path, "train.jsonl", "no line")

    def test_one_line_cannot_be_halved(self, tmp_path):
        self.fails(make(tmp_path, ["CB"], validation=1), "val.jsonl", "two lines")

    def test_tasks_asked_for_that_are_not_there(self, tmp_path):
        self.fails(make(tmp_path, ["CB"]), "RTE", "only CB", wanted=["RTE"])

    @pytest.mark.parametrize(
        ("task", "change", "words"),
        [
            ("CB", {"premise": ...}, ["line 2", "'premise'", "'hypothesis'"]),
            ("CB", {"label": "maybe"}, ["line 2", '"entailment"', '"maybe"']),
            ("BoolQ", {"label": 1}, ["true, false", "found 1"]),
            ("BoolQ", {"passage": None}, ["a text under 'passage'", "null"]),
            ("COPA", {"label": True}, ["0, 1", "true"]),
            ("MultiRC", {"passage": {"text": "", "questions": []}}, ["list of objects", "[]"]),
            ("MultiRC", {"passage": {"text": "", "questions": [1]}}, ["questions", "[1]"]),
            ("MultiRC", {"passage": "text"}, ["an object under 'passage'", '"text"']),
            ("ReCoRD", {"qas": [{"query": "", "idx": 0}]}, ["line 2, qas[0]", "'answers'"]),
            (
                "ReCoRD",
                {"passage": {"text": "Ada", "entities": [{"start": 0, "end": 3}]}},
                ["passage, entities[0]", "3 letters", "0 and 3"],
            ),
            (
                "WSC",
                {"target": {"span1_index": 50, "span1_text": "a"}},
                ["line 2, target", "span1_index", "10", "50"],
            ),
            ("WSC", {"target": {"span1_text": "a", "span1_index": "1"}}, ["whole number", '"1"']),
        ],
    )  # fmt: skip
    def test_keys_and_values(self, tmp_path, task, change, words):
        rows = [MAKERS[task](i) for i in range(3)]
        rows[1] = {k: v for k, v in (rows[1] | change).items() if v is not ...}
        make(tmp_path, [task])
        write(tmp_path / task / "train.jsonl", rows)
        self.fails(tmp_path, "train.jsonl", *words)

    def test_long_values_are_shortened(self, tmp_path):
        make(tmp_path, ["CB"])
        row = MAKERS["CB"](0) | {"label": "x" * 1000}
        (tmp_path / "CB" / "train.jsonl").write_text(json.dumps(row))
        with pytest.raises(LayoutError) as caught:
            load(tmp_path, seed=0)
        assert len(str(caught.value)) < 400
