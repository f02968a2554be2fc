"""What users meet, thresholds, page, guide and README, is what the committed records say."""

import dataclasses
from pathlib import Path

import pytest

from microclip.probing import Forecast, Thumb
from microclip_lab.evidence.by_kind import ADVISED, KINDS, Decision, Kind, Known, decisions
from microclip_lab.evidence.catalog import STUDIES
from microclip_lab.evidence.command import RESULTS, cost, parser
from microclip_lab.evidence.plan import editions
from microclip_lab.evidence.publish import GUIDE, THRESHOLDS, published, replaced, thresholds_source
from microclip_lab.evidence.records import read_all
from microclip_lab.evidence.sequential import Interval
from microclip_lab.evidence.when_to_clip import (
    FIGURES,
    RULES,
    Case,
    cases,
    forecast,
    outside_records,
    sign_test,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def committed():
    return read_all(ROOT / RESULTS, editions()), outside_records(ROOT / "results/dirty_data")


def test_everything_published_is_what_the_records_say(committed):
    for path, text in published(*committed, ROOT).items():
        assert text == (ROOT / path).read_text(encoding="utf-8"), (
            f"{path} is out of date: run benchmarks/evidence.py --publish"
        )


def test_other_records_would_give_other_thresholds(committed):
    records, outside = committed
    known = cases(records, outside)
    turned = {"gain": "harm", "harm": "gain", "nothing": "nothing"}
    other = [dataclasses.replace(case, came=turned[case.came]) for case in known]
    decided = decisions(records, outside)
    text = thresholds_source([forecast(rule, other) for rule in RULES], decided)
    assert text != (ROOT / THRESHOLDS).read_text(encoding="utf-8")
    assert decisions({}, outside) != decided


def test_every_task_is_of_one_kind():
    tasks = [task for kind in KINDS for task in kind.tasks]
    assert len(tasks) == len(set(tasks))
    assert {study.name for study in STUDIES} <= set(tasks)


def decision(*tasks):
    """Return the decision of tasks, each given as the outcomes of Unit, MinNorm, LossHistory."""
    known = []
    for name, came in enumerate(tasks):
        means = {"gain": 5.0, "harm": -5.0, "nothing": 0.0}
        effects = {
            arm: Interval(means[each], means[each] - 1, means[each] + 1, 8, 1.0)
            for arm, each in zip(ADVISED, came, strict=True)
        }
        known.append(Known(str(name), effects, dict(zip(ADVISED, came, strict=True))))
    return Decision(Kind("k", "noisy", ()), tuple(known), (), ())


@pytest.mark.parametrize(
    ("tasks", "arm"),
    [
        ([("gain", "harm", "nothing")], "unit-4"),
        ([("gain", "gain", "nothing"), ("nothing", "gain", "nothing")], "minnorm-4"),
        ([("gain", "harm", "nothing"), ("harm", "gain", "gain")], None),  # 1 of 2 is not enough
        ([("nothing", "nothing", "nothing")], None),
        ([], None),
    ],
)
def test_a_rule_is_advised_if_it_mostly_gains_and_never_harms(tasks, arm):
    found = decision(*tasks)
    assert found.arm == arm
    if arm is None and tasks:
        assert found.to_do.startswith("plain")


def test_a_forecast_is_judged_on_what_it_was_not_fitted_on():
    def case(value, came, half):
        return Case("t", "unit-4", half, dict.fromkeys(FIGURES, value), came)

    fit = [case(0.9, "gain", "fit"), case(0.8, "gain", "fit"), case(0.2, "harm", "fit")]
    rest = [case(0.7, "gain", "judge"), case(0.1, "harm", "outside"), case(0.1, "harm", "outside")]
    assert forecast("unit-4", [*fit, *rest]) == Forecast("Unit", None, 3, 3)
    found = forecast("unit-4", [*fit, case(0.3, "harm", "fit"), *rest])
    assert found.thumb == Thumb(FIGURES[0], 0.55, 0.55)
    assert (found.fitted_on, found.judged_on, found.right) == (4, 3, 3)
    assert (found.guess, found.guess_right, found.luck) == ("harm", 2, 0.5)
    assert found.beats_guessing
    assert sign_test([True, False], [False, True]) == 0.75


def test_a_guide_without_its_comments_is_refused():
    with pytest.raises(ValueError, match=r"docs/when-to-use\.md must have the lines <!-- by kind"):
        replaced("nothing", "by kind", [], GUIDE)


def test_help_says_what_the_plan_costs(committed, monkeypatch):
    monkeypatch.chdir(ROOT)
    records, _ = committed
    hours = sum(record.seconds for record in records.values()) / 3600
    assert f"{len(records):,} runs and {hours:.1f} core-hours" in parser().format_help()
    assert "no records" in cost({})
