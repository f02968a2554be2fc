"""Accuracies by domain and the metrics of SuperGLUE's tasks, checked by hand."""

import pytest

from microclip_lab.language.metrics import (
    Verdict,
    best_f1,
    class_f1,
    exact_groups,
    is_exact,
    macro_f1,
    majority,
    summary,
    words,
)


def verdicts(domain, chosen, right, groups=None, f1=None):
    return [
        Verdict(domain, group, c, r, float(c == r), float(c == r) if f1 is None else f1[i])
        for i, (c, r, group) in enumerate(
            zip(chosen, right, groups or range(len(chosen)), strict=True)
        )
    ]


def test_domains_count_by_their_size_and_once_more_all_alike():
    movie = verdicts("movie", [0, 0, 1, 1], [0, 0, 1, 0])  # 3 of 4
    nyt = verdicts("nyt", [1], [0])  # 0 of 1
    assert summary(movie + nyt) == {
        "accuracy": 0.6,
        "accuracy_of_domains": 0.375,
        "accuracy_movie": 0.75,
        "accuracy_nyt": 0.0,
    }


def test_the_order_of_records_does_not_matter():
    records = verdicts("cb", [0, 1, 2], [0, 0, 2]) + verdicts("multirc", [0, 1], [1, 1], [0, 0])
    assert summary(records) == pytest.approx(summary(records[::-1]))


def test_f1_of_a_class():
    # two hits, one false alarm, one miss: precision and recall are 2/3
    assert class_f1([1, 1, 1, 0, 0], [1, 1, 0, 1, 0], positive=1) == pytest.approx(2 / 3)
    assert class_f1([0, 0], [1, 0], positive=1) == 0  # never chosen


def test_macro_f1_is_the_mean_over_classes():
    # class 0: 1 hit, 1 false alarm: 2/3; class 1: 1 hit, 1 miss: 2/3; class 2: 1
    assert macro_f1([0, 0, 1, 2], [0, 1, 1, 2]) == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)


def test_a_question_counts_if_all_its_answers_are_right():
    assert exact_groups([7, 7, 7, 8, 8, 9], [1, 1, 1, 1, 0, 1]) == pytest.approx(2 / 3)


def test_cb_has_accuracy_and_macro_f1():
    found = summary(verdicts("cb", [0, 0, 1, 2], [0, 1, 1, 2]))
    assert found["accuracy_cb"] == 0.75
    assert found["f1_cb"] == pytest.approx(7 / 9)
    assert found["superglue"] == pytest.approx((0.75 + 7 / 9) / 2)


def test_multirc_has_f1_over_answers_and_exact_match_over_questions():
    # the choices are False, True
    records = verdicts("multirc", [1, 0, 1, 1], [1, 0, 1, 0], groups=[0, 0, 1, 1])
    found = summary(records)
    assert found["accuracy_multirc"] == 0.75
    assert found["f1_multirc"] == pytest.approx(2 * 2 / (2 * 2 + 1))
    assert found["exact_multirc"] == 0.5
    assert found["superglue"] == pytest.approx((0.8 + 0.5) / 2)


def test_record_has_f1_and_exact_match():
    found = summary(verdicts("record", [0, 1], [0, 0], f1=[1.0, 0.5]))
    assert found["accuracy_record"] == 0.5
    assert found["f1_record"] == 0.75


def test_the_score_is_the_mean_over_tasks_however_large():
    records = verdicts("rte", [0] * 9, [0] * 9) + verdicts("wic", [0], [1])
    assert summary(records)["superglue"] == 0.5
    assert "superglue" not in summary(verdicts("movie", [0], [0]))


def test_words_count_without_case_punctuation_and_articles():
    assert words("The  U.S. Navy's a-team") == ["us", "navys", "ateam"]
    assert is_exact("the Navy", ["Army", "navy."])
    assert not is_exact("navy seals", ["navy"])


def test_f1_of_the_nearest_answer():
    assert best_f1("New York City", ["York", "New York"]) == pytest.approx(2 * 2 / 5)
    assert best_f1("Lund", ["Malmo"]) == 0


def test_majority():
    assert majority(["a", "b", "a", "c"]) == 0.5
