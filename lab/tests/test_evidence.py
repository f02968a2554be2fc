"""The evidence plan: decision rule, gate, looks, verdicts, records that repeat bit for bit."""

import dataclasses
import json
import math
import random
import statistics

import pytest
import torch

from microclip_lab.dirty_data.training import Setup
from microclip_lab.evidence.arms import ARMS, ORACLE, PLAIN
from microclip_lab.evidence.catalog import BY_NAME, STUDIES, TUNING_SEEDS
from microclip_lab.evidence.claims import CLAIMS
from microclip_lab.evidence.command import main
from microclip_lab.evidence.page import page
from microclip_lab.evidence.plan import (
    HEADROOM,
    Plan,
    compared,
    editions,
    effect,
    gate,
    outcome_of,
)
from microclip_lab.evidence.records import LAST, Record, read_all
from microclip_lab.evidence.run import run
from microclip_lab.evidence.sequential import (
    ALPHA,
    Interval,
    interval,
    outcome,
    relative,
    seeds_needed,
)
from microclip_lab.evidence.snapshots import snapshot
from microclip_lab.evidence.synthetic_tasks import mixture_data, outlier_data
from microclip_lab.evidence.verdicts import decide, open_arms, verdicts
from microclip_lab.evidence.when_to_clip import FIGURES, Case, cases, fitted, hit_rate
from microclip_lab.tuned_arms.records import Job, append
from microclip_lab.tuned_arms.search import evaluated, is_tuned, rate_of, tuned

STUDY = BY_NAME["tuned-canaries"]
SHORT = dataclasses.replace(STUDY.task, epochs=2)
OUTLIERS = dataclasses.replace(BY_NAME["outliers-7-10"].task, epochs=2)


# ---- the decision rule


def test_more_looks_make_wider_intervals():
    values = [1.0, 2.0, 4.0, 3.0]
    one, three = interval(values), interval(values, 3)
    assert one.mean == three.mean == 2.5
    assert three.low < one.low < one.high < three.high


def test_looking_three_times_errs_at_most_as_often_as_promised():
    draw, looks, missed, trials = random.Random(0), (4, 8, 16), 0, 1500
    for _ in range(trials):
        values = [draw.gauss(0, 1) for _ in range(looks[-1])]
        found = [interval(values[:count], len(looks)) for count in looks]
        missed += any(each.low > 0 or each.high < 0 for each in found)
    assert missed / trials < ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / trials)
    assert missed > 0.3 * ALPHA * trials  # valid, and not wastefully wide


def test_a_relative_effect_is_in_percent_of_the_base():
    found = relative([10.0, 12.0, 8.0], [9.0, 11.0, 7.0])
    assert found.mean == pytest.approx(10.0)
    assert found.low < 10 < found.high
    worse = relative([9.0, 11.0, 7.0], [10.0, 12.0, 8.0])
    assert worse.mean == pytest.approx(-100 / 9)


def test_a_diverged_run_has_no_interval():
    assert relative([10.0, math.inf], [9.0, 9.0]) is None
    assert outcome(None, 2.0) == "undecided"


def test_power_grows_with_the_square_of_the_effect():
    few, many = (seeds_needed(10.0, effect) for effect in (8.0, 4.0))
    assert 3 * few < many < 5 * few


@pytest.mark.parametrize(
    ("low", "high", "expects", "verdict"),
    [
        (1, 5, "above", "holds"),
        (-5, 1, "above", "refuted"),
        (-5, 3, "above", "undecided"),
        (-5, -1, "below", "holds"),
        (-1, 5, "below", "refuted"),
        (-1, 1, "within", "holds"),
        (3, 5, "within", "refuted"),
        (1, 3, "within", "undecided"),
        (-1, 9, "not below", "holds"),
        (-9, -3, "not below", "refuted"),
        (-9, 3, "not below", "undecided"),
    ],
)
def test_verdicts_by_hand(low, high, expects, verdict):
    assert decide(Interval((low + high) / 2, low, high, 8, 1.0), expects, 2.0) == verdict


# ---- the plan, with made-up results


def fake(job, errors, best=0, noise=0.02):
    """Return a record with the arm's mean error, worse the farther its rate is from the best."""
    draw = random.Random(f"{job.task} {job.arm} {job.seed}")
    distance = abs(math.log2(job.rate / rate_of(best)))
    error = errors.get(job.arm, 20.0) * (1 + noise * draw.gauss(0, 1)) + distance
    test = dict.fromkeys((LAST, "best_noisy", "best_clean"), error)
    curve = [50.0, 100 - error]
    return Record(
        *(job.task, job.arm, job.stage, job.rate, job.seed),
        *("1.1", curve, curve, test if job.stage == "evaluate" else {}),
    )


def finished(plan, errors, **options):
    records = {}
    while missing := list(plan.missing(records)):
        records |= {job: fake(job, errors, **options) for job in missing}
    return records


def test_a_task_without_headroom_runs_nothing_else():
    records = finished(Plan([STUDY]), {ORACLE: 19.8})
    assert gate(records, STUDY) == "no headroom"
    assert {job.arm for job in records} == {PLAIN, ORACLE}


def test_seeds_are_added_only_while_an_arm_is_undecided():
    errors = {ORACLE: 10.0, "minnorm-4": 12.0, "minnorm-1": 30.0, "unit-4": 19.4}
    records = finished(Plan([STUDY]), errors, noise=0.06)
    assert gate(records, STUDY) == "passed"
    counts = {arm: len(evaluated(records, STUDY, arm)) for arm in STUDY.arms}
    assert counts["minnorm-4"] == counts["minnorm-1"] == STUDY.looks[0]
    assert counts["unit-4"] == STUDY.looks[-1]  # 3 % is too little to see
    assert counts[PLAIN] == max(counts.values())
    assert outcome_of(records, STUDY, "minnorm-4") == "gain"
    assert outcome_of(records, STUDY, "minnorm-1") == "harm"


def test_every_arm_is_tuned_with_four_seeds_and_never_at_an_edge():
    records = finished(Plan([STUDY]), {ORACLE: 10.0}, best=3)
    assert len(TUNING_SEEDS) >= 4
    for arm in STUDY.arms:
        found = tuned(records, STUDY, arm)
        assert is_tuned(records, STUDY, arm)
        assert found.k == 3
        assert not found.is_at_edge


def test_seeds_between_two_looks_do_not_count():
    base = {seed: fake(Job("t", PLAIN, "evaluate", 0.001, seed), {}) for seed in range(20)}
    other = {seed: fake(Job("t", "unit-4", "evaluate", 0.001, seed), {}) for seed in range(15)}
    found, look = compared(base, other, (8, 16, 32))
    assert (found.count, look) == (8, 1)


def test_the_papers_protocol_uses_the_clean_tasks_rate():
    worse, clean = BY_NAME["photos-worse"], BY_NAME["photos-clean"]
    records = finished(Plan([clean]), {}, best=2)
    noisy = Plan([worse])
    while missing := list(noisy.missing(records)):
        records |= {job: fake(job, {ORACLE: 10.0}, best=-2) for job in missing}
    assert tuned(records, worse, PLAIN).k == -2
    for arm in (PLAIN, "minnorm-4", "unit-4"):
        assert len(evaluated(records, worse, arm, rate=rate_of(2))) == worse.looks[0]


def test_one_look_is_enough_for_a_taste():
    records = finished(Plan([STUDY], ["unit-4"], 1), {ORACLE: 10.0, "unit-4": 19.9})
    assert {job.arm for job in records} == {PLAIN, ORACLE, "unit-4"}
    assert len(evaluated(records, STUDY, "unit-4")) == STUDY.looks[0]


def test_every_claim_names_tasks_and_arms_of_the_plan():
    assert [claim.id for claim in CLAIMS] == [
        *(f"C{number}" for number in range(1, 8)),
        *(f"M{number}" for number in range(1, 5)),
    ]
    for claim in CLAIMS:
        for test in claim.tests:
            study = BY_NAME[test.task]
            used = [
                getattr(test.quantity, name)
                for name in ("arm", "base")
                if hasattr(test.quantity, name)
            ]
            assert set(used) <= set(study.arms), (claim.id, test.task, used)


def test_claims_follow_the_records():
    errors = {ORACLE: 10.0, "minnorm-4": 15.0, "minnorm-16": 16.0, "minnorm-1": 30.0}
    records = finished(Plan([STUDY]), errors)
    found = {verdict.claim.id: verdict for verdict in verdicts(records)}
    assert found["C2"].by_task["tuned-canaries"] == "holds"
    assert found["C2"].by_task["scratch-canaries"] == "not run"
    assert found["C2"].overall == "holds on 1"
    assert found["C7"].overall == "not run yet"


def test_studies_halve_the_tasks_for_the_predictor():
    halves = [study.half for study in STUDIES]
    assert abs(halves.count("fit") - halves.count("judge")) <= len(STUDIES) // 4
    assert HEADROOM == 8.0
    assert all(arm in ARMS for study in STUDIES for arm in study.arms)


# ---- real runs


def test_canaries_are_those_marked_and_the_pre_training_is_shared():
    clean, dirty = mixture_data(1000, 0.0, "none"), mixture_data(1000, 0.07, "canaries")
    assert int(dirty.wrong.sum()) == round(0.07 * 1024)
    assert not clean.wrong.any()
    assert len(dirty.test) == 4000
    assert dirty.clean_validation is not None
    one, two = (BY_NAME[name].task.model(1000) for name in ("tuned-canaries", "tuned-clean"))
    assert all(map(torch.equal, one.state_dict().values(), two.state_dict().values()))


def test_outliers_are_off_by_their_size():
    data = outlier_data(3, 0.2, 10.0)
    assert data.training.targets[data.wrong].abs().min() > 5
    assert data.training.targets[~data.wrong].abs().max() < 5
    differ = data.validation.targets != data.clean_validation.targets
    assert int(differ.sum()) == round(0.2 * 512)


def test_a_run_repeats_bit_for_bit_and_survives_a_file(tmp_path):
    record = run(OUTLIERS, "minnorm-4", 1000, 1e-3, engine="fused")
    append(tmp_path, record)
    with (tmp_path / "outliers-7-10.jsonl").open("a") as file:
        file.write(json.dumps(record.to_json())[:50])  # a crash
    kept = read_all(tmp_path, editions())
    assert list(kept) == [record.job]
    assert run(OUTLIERS, "minnorm-4", 1000, 1e-3, engine="fused").same_as(kept[record.job])
    other = run(OUTLIERS, "minnorm-4", 1001, 1e-3, engine="fused")
    assert not other.same_as(kept[record.job])
    assert other.weights != record.weights


@pytest.mark.parametrize("engine", ["stream", "fused"])
def test_either_engine_repeats_bit_for_bit(engine):
    one, two = (run(OUTLIERS, "minnorm-16", 1000, 1e-3, engine=engine) for _ in range(2))
    assert one.same_as(two)


def test_one_microbatch_is_plain_training_bit_for_bit():
    plain, whole = (run(SHORT, a, 1000, 1e-3, engine="stream") for a in (PLAIN, "minnorm-whole"))
    assert plain.weights == whole.weights
    assert plain.test == whole.test


def test_snapshots_are_what_the_gradients_are():
    task = SHORT
    data = mixture_data(1000, 0.07, "canaries")
    model = task.model(1000)
    setup = Setup(task, data, model, 1000, 1e-3, 1e-3)
    found = snapshot(setup)
    draw = torch.Generator().manual_seed(1000 + 70_000)
    rows = torch.randperm(1024, generator=draw)[:256]
    norms = []
    for row in rows:
        loss = setup.losses((data.training.inputs[row, None], data.training.targets[row, None]))
        gradients = torch.autograd.grad(loss.sum(), list(model.parameters()))
        norms.append(math.sqrt(sum(float(g.double().square().sum()) for g in gradients)))
    energy = torch.tensor(norms).square()
    top = energy.sort(descending=True).values[:25].sum() / energy.sum()
    assert found["top_decile"] == pytest.approx(float(top), rel=1e-3)
    wrong = data.wrong[rows]
    share = float(energy[wrong].sum() / energy.sum())
    assert found["share"] == pytest.approx(share, rel=1e-3)
    lengths = torch.tensor(norms)
    ratio = float(lengths[wrong].mean() / lengths[~wrong].mean())
    assert found["ratio"] == pytest.approx(ratio, rel=1e-3)
    assert 0 < found["min_over_mean_1"] < found["min_over_mean_4"] < 1


def test_effects_are_computed_from_the_last_step():
    errors = {ORACLE: 10.0, "unit-4": 15.0}
    records = finished(Plan([STUDY], ["unit-4"], 1), errors, noise=0.0)
    found = effect(records, STUDY, "unit-4")
    plain = statistics.fmean(r.test[LAST] for r in evaluated(records, STUDY, PLAIN).values())
    assert plain == pytest.approx(20.0)
    assert found.mean == pytest.approx(25.0)


# ---- when to clip


def test_the_rule_of_thumb_finds_thresholds_and_is_judged_on_other_cases():
    def case(value, came, half="fit"):
        return Case("t", "unit-4", half, dict.fromkeys(FIGURES, value), came)

    known = [case(0.9, "gain"), case(0.8, "gain"), case(0.5, "nothing"), case(0.1, "harm")]
    thumb = fitted(known)
    assert hit_rate(thumb, known) == 1.0
    assert 0.1 < thumb.harm_below < 0.5 < thumb.gain_from < 0.8
    assert thumb.figure == FIGURES[0]
    judged = [case(0.7, "gain", "judge"), case(0.3, "gain", "judge")]
    assert hit_rate(thumb, judged) == 0.5
    assert fitted(known[:3]) is None  # too few to fit on


def test_cases_leave_out_what_is_undecided():
    errors = {ORACLE: 10.0, "minnorm-4": 15.0, "unit-4": 19.6}
    records = finished(Plan([STUDY], ["minnorm-4", "unit-4"]), errors, noise=0.06)
    figures = {"early/top_decile": 0.6, "first/top_decile": 0.4, "early/min_over_mean_4": 0.2}
    seen = {
        job: dataclasses.replace(record, notes=figures if job.arm == PLAIN else {})
        for job, record in records.items()
    }
    found = cases(seen, {})
    assert [(case.rule, case.came) for case in found] == [("minnorm-4", "gain")]
    assert found[0].figures["rise_of_top_decile"] == pytest.approx(0.2)


# ---- the page and the command


def test_the_page_leads_with_advice_and_says_what_was_not_run():
    errors = {
        ORACLE: 10.0,
        "minnorm-1": 30.0,
        "minnorm-4": 15.0,
        "minnorm-16": 16.0,
        "unit-4": 12.0,
    }
    names = ("tuned-canaries", "scratch-canaries", "tuned-labels", "outliers-7-10")
    text = page(finished(Plan([BY_NAME[name] for name in names]), errors), {})
    order = [
        text.index(f"## {title}")
        for title in ("What to do", "Verdicts", "Effects by kind", "Every task")
    ]
    assert order == sorted(order)
    assert "**Unit, b = 4**: gained on 4 of 4 (" in text
    assert "**MinNorm, b = 1**: harmed on 4 of 4 (" in text
    assert "Gate: **passed**" in text
    waiting = text.split("not run yet: ")[1].split(".")[0].split(", ")
    assert "speech-tuned" in waiting
    assert not set(names) & set(waiting)


def test_the_command_repeats_a_recorded_run(tmp_path, capsys):
    record = run(BY_NAME["outliers-7-10"].task, PLAIN, 100, 1e-3, "tune")
    append(tmp_path, record)
    with pytest.raises(SystemExit) as same:
        main(["--rerun", "--out", str(tmp_path)])
    assert same.value.code == 0
    assert "the same, bit for bit" in capsys.readouterr().out
    path = tmp_path / "outliers-7-10.jsonl"
    path.write_text(path.read_text().replace(record.weights, "0" * 16))
    with pytest.raises(SystemExit) as other:
        main(["--rerun", "--out", str(tmp_path)])
    assert other.value.code == 1


def test_the_command_names_what_there_is_instead(tmp_path, capsys):
    for options, hint in (
        (["--arms", "none"], "minnorm-4"),
        (["--tasks", "none"], "tuned-canaries"),
        (["--workers", "0"], "--workers must be 1 or more"),
    ):
        with pytest.raises(SystemExit):
            main([*options, "--out", str(tmp_path)])
        assert hint in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


class TestClaimsGoOn:
    """A claim that is undecided asks for more seeds of its arms, decided on their own or not."""

    def records(self, spread):
        study, found = BY_NAME["domains"], {}
        numbers = random.Random(1)
        for arm in study.arms:
            for k in (-1, 0, 1):
                for seed in TUNING_SEEDS:
                    validation = [50.0, 50.0 - abs(k)]
                    job = Job(study.name, arm, "tune", rate_of(k), seed)
                    found[job] = self.record(job, validation, {})
            for seed in range(16):
                error = {"plain": 30, "minnorm-4": 33}.get(arm, 30.0)
                small = error + numbers.gauss(0, spread)
                test = {"last": error + numbers.gauss(0, 0.1)}
                test |= {f"last/{place}": small for place in range(4)}
                job = Job(study.name, arm, "evaluate", rate_of(0), seed)
                found[job] = self.record(job, [50.0, 50.0], test)
        return study, found

    def record(self, job, curve, test):
        identity = job.task, job.arm, job.stage, job.rate, job.seed
        return Record(*identity, "1.1", curve, curve, test)

    def test_small_domains_that_vary(self):
        study, records = self.records(spread=9)
        missing = Plan([study], open_arms=open_arms).missing_of(study, records)
        assert {job.arm for job in missing} == {"plain", "minnorm-4", "minnorm-4-domains"}
        assert {job.seed for job in missing} == set(range(16, 32))
        assert Plan([study]).missing_of(study, records) == []

    def test_small_domains_that_do_not(self):
        study, records = self.records(spread=0.1)
        assert Plan([study], open_arms=open_arms).missing_of(study, records) == []


def test_an_arm_that_diverged_once_harms():
    errors = {ORACLE: 15.0}
    records = finished(Plan([STUDY], ["minnorm-1"], most=1), errors)
    job = next(j for j in records if j.arm == "minnorm-1" and j.stage == "evaluate" and j.seed == 3)
    records[job] = dataclasses.replace(
        records[job], test=dict.fromkeys((LAST, "best_noisy", "best_clean"), math.inf)
    )
    assert outcome_of(records, STUDY, "minnorm-1") == "harm"
    assert "MinNorm, b = 1" in page(records, {})
