"""The dirty-data benchmark: what is wrong is wrong, rivals are as published, nothing is lost."""

import dataclasses
import json
import math
import multiprocessing
import os
import threading
import time
from functools import partial

import numpy as np
import psutil
import pytest
import torch
from torch.nn import functional as F

from microclip_lab.dirty_data import rivals, run
from microclip_lab.dirty_data.arms import ARMS, arms_of, rule_named
from microclip_lab.dirty_data.catalog import TASKS, task_named
from microclip_lab.dirty_data.command import main
from microclip_lab.dirty_data.plan import (
    DEVELOPMENT_SEEDS,
    EVALUATION_SEEDS,
    HIGHEST,
    TUNING_SEEDS,
    Plan,
    best_of,
    editions,
    next_rates,
    rate_of,
    tuned,
)
from microclip_lab.dirty_data.records import Job, Record, append, read_all
from microclip_lab.dirty_data.runner import FailedRunsError, status, work
from microclip_lab.dirty_data.synthetic_tasks import mixture_data, regression_data
from microclip_lab.dirty_data.tables import markdown, summarize
from microclip_lab.dirty_data.task import mislabeled
from microclip_lab.dirty_data.text_tasks import (
    LENGTH,
    SHIFT,
    NextCharacter,
    document_losses,
)
from microclip_lab.dirty_data.training import Setup, train
from microclip_lab.dirty_data.vision_tasks import digits_data
from microclip_lab.vision import digit_splits

DIGITS = TASKS["digits-20"]
SHORT = dataclasses.replace(DIGITS, name="short", epochs=2)


# ---- data


@pytest.mark.parametrize("pairs", [False, True])
def test_exactly_the_share_of_labels_is_wrong(pairs):
    labels = np.arange(1000) % 10
    given, wrong = mislabeled(labels, 0.4, 10, np.random.default_rng(0), pairs=pairs)
    assert wrong.sum() == 400
    assert ((given != labels) == wrong).all()
    shifts = set(((given - labels) % 10)[wrong].tolist())
    assert shifts == ({1} if pairs else set(range(1, 10)))


def test_digits_are_marked_wrong_where_the_label_is():
    data = digits_data(3, 0.4)
    pixels, labels = digit_splits.originals()
    clean = digit_splits.load(3, 0.0)
    truth = torch.tensor(labels)[clean.training.places]
    assert torch.equal(data.wrong, data.training.targets != truth)
    assert int(data.wrong.sum()) == 360
    dirty = data.validation.targets != clean.validation.labels
    assert int(dirty.sum()) == round(0.4 * 297)
    assert torch.equal(data.test.targets, clean.test.labels)
    assert len(pixels) == 1797


@pytest.mark.parametrize("outliers", ["symmetric", "skewed"])
def test_outliers_are_far_off_and_only_in_training_and_validation(outliers):
    clean, dirty = (regression_data(5, noise, outliers) for noise in (0.0, 0.2))
    assert int(dirty.wrong.sum()) == round(0.2 * len(dirty.training))
    right = dirty.training.targets[~dirty.wrong]
    assert right.abs().max() < 6
    assert dirty.training.targets[dirty.wrong].abs().mean() > 3
    if outliers == "skewed":
        assert dirty.training.targets[dirty.wrong].mean() > 3
    assert not clean.wrong.any()
    assert dirty.test.targets.abs().max() < 6
    assert dirty.validation.targets.abs().max() > 4


def test_data_depends_on_the_seed_and_on_nothing_else():
    one, same, other = (mixture_data(seed, 0.07) for seed in (1, 1, 2))
    assert torch.equal(one.training.targets, same.training.targets)
    assert torch.equal(one.training.inputs, same.training.inputs)
    assert not torch.equal(one.training.inputs, other.training.inputs)


def test_the_network_sees_no_character_that_it_predicts():
    torch.manual_seed(0)
    model, inputs = NextCharacter(), torch.randint(1, 30, (1, LENGTH + 5))
    changed = inputs.clone()
    changed[0, 20] = 31
    differ = (model(inputs) != model(changed)).any(1)[0]
    # the input at 20 is the character before the prediction at 20 - 5
    assert differ.nonzero().flatten().tolist() == list(range(15, 21))
    assert model(inputs).shape[2] == LENGTH


def test_the_loss_of_a_document_is_its_mean():
    outputs = torch.zeros(2, 4, 3)
    outputs[0, 1, :] = 100.0
    found = document_losses(outputs, torch.tensor([[1, 1, 1], [0, 1, 2]]))
    assert found.tolist() == pytest.approx([0.0, math.log(4)])
    assert SHIFT > 0


# ---- rivals, by hand

TWO_THIRDS = torch.tensor([[math.log(2.0), 0.0], [math.log(2.0), 0.0]])  # p = (2/3, 1/3)
BOTH = torch.tensor([0, 1])


def test_generalized_cross_entropy():
    found = rivals.generalized_cross_entropy(TWO_THIRDS, BOTH).tolist()
    assert found == pytest.approx([(1 - (2 / 3) ** 0.7) / 0.7, (1 - (1 / 3) ** 0.7) / 0.7])


def test_generalized_cross_entropy_has_a_finite_gradient_at_certainty():
    outputs = torch.tensor([[200.0, 0.0]], requires_grad=True)
    rivals.generalized_cross_entropy(outputs, torch.tensor([1])).sum().backward()
    assert outputs.grad.isfinite().all()


def test_symmetric_cross_entropy():
    found = rivals.symmetric_cross_entropy(TWO_THIRDS, BOTH).tolist()
    # 0.1 CE + 4 (1 - p)
    assert found == pytest.approx([0.1 * math.log(1.5) + 4 / 3, 0.1 * math.log(3.0) + 8 / 3])


def test_label_smoothing():
    found = rivals.smoothed_cross_entropy(TWO_THIRDS, BOTH).tolist()
    # 0.95 of the target's, 0.05 of the other's
    low, high = math.log(1.5), math.log(3.0)
    assert found == pytest.approx([0.95 * low + 0.05 * high, 0.95 * high + 0.05 * low])


def test_label_smoothing_of_a_document_is_the_mean_over_its_characters():
    outputs, targets = torch.randn(2, 5, 3), torch.randint(0, 5, (2, 3))
    each = F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(rivals.smoothed_cross_entropy(outputs, targets), each.mean(1))


def test_huber_and_absolute_error():
    outputs, targets = torch.tensor([[0.5], [3.0]]), torch.zeros(2)
    assert rivals.huber(outputs, targets).tolist() == pytest.approx([0.125, 2.5])
    assert rivals.absolute_error(outputs, targets).tolist() == pytest.approx([0.5, 3.0])


def test_early_learning_regularization_over_two_visits():
    objective = rivals.EarlyLearning(examples=5, classes=2)
    rows = torch.tensor([3, 1])
    # t = 0.3 p, then CE + 3 log(1 - <p, t>)
    inner = 0.3 * (4 / 9 + 1 / 9)
    first = objective(rows, TWO_THIRDS, BOTH).tolist()
    assert first == pytest.approx(
        [math.log(1.5) + 3 * math.log(1 - inner), math.log(3) + 3 * math.log(1 - inner)], rel=1e-5
    )
    inner *= 1.7  # t = 0.7 x 0.3 p + 0.3 p
    second = objective(rows, TWO_THIRDS, BOTH).tolist()
    assert second[0] == pytest.approx(math.log(1.5) + 3 * math.log(1 - inner), rel=1e-5)
    assert objective.targets[[0, 2, 4]].abs().sum() == 0


def setup_of(task, seed=1, rate=1e-3):
    return Setup(task, task.make_data(seed), task.model(seed), seed, rate, rate)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_the_oracle_is_the_mean_over_the_right_examples():
    setup = setup_of(SHORT)
    part, rows = setup.data.training, torch.arange(32)
    ARMS["oracle"].start(setup)(rows, (part.inputs[rows], part.targets[rows]))
    found = gradient(setup.model)
    setup.model.zero_grad()
    right = rows[~setup.data.wrong[rows]]
    assert 0 < len(right) < 32
    setup.losses((part.inputs[right], part.targets[right])).mean().backward()
    torch.testing.assert_close(found, gradient(setup.model))


def test_co_teaching_trains_each_network_on_what_the_other_finds_easy():
    task = dataclasses.replace(SHORT, epochs=4)  # the forget rate grows over one epoch
    setup = setup_of(task)
    backward = rivals.co_teaching(setup)
    other = setup.also_trained[0]
    part, rows = setup.data.training, torch.arange(32)
    batch = part.inputs[rows], part.targets[rows]
    for _ in range(setup.steps_per_epoch):
        backward(rows, batch)
    for network in (setup.model, other):
        network.zero_grad()
    backward(rows, batch)
    one, two = gradient(setup.model).clone(), gradient(other).clone()
    for network, judge, found in ((setup.model, other, one), (other, setup.model, two)):
        with torch.no_grad():
            easy = task.losses(judge(batch[0]), batch[1]).argsort()[:26]  # round(0.8 x 32)
        network.zero_grad()
        task.losses(network(batch[0][easy]), batch[1][easy]).mean().backward()
        torch.testing.assert_close(found, gradient(network))


def test_weight_averaging_evaluates_the_mean_of_few_steps():
    task = dataclasses.replace(SHORT, epochs=10)
    setup = setup_of(task)
    ARMS["averaging"].start(setup)
    seen = []
    for step in range(5):  # fewer than a tenth of all steps
        with torch.no_grad():
            for parameter in setup.model.parameters():
                parameter.add_(step + 1.0)
        seen.append(torch.cat([p.detach().flatten() for p in setup.model.parameters()]))
        setup.after_step[0]()
    average = torch.cat([p.detach().flatten() for p in setup.evaluated.parameters()])
    torch.testing.assert_close(average, torch.stack(seen).mean(0))


def test_confident_learning_finds_confident_disagreement_only():
    sure, unsure = [0.95, 0.05], [0.55, 0.45]
    probabilities = np.array([sure] * 10 + [unsure] * 2 + [sure[::-1]] * 10 + [sure] * 2)
    labels = np.array([0] * 12 + [1] * 12)
    assert rivals.label_issues(labels, probabilities).nonzero()[0].tolist() == [22, 23]


def test_confident_learning_agrees_with_cleanlab():
    cleanlab = pytest.importorskip("cleanlab.filter")
    draw = np.random.default_rng(0)
    truth = draw.integers(5, size=600)
    labels = np.where(draw.random(600) < 0.25, draw.integers(5, size=600), truth)
    logits = draw.normal(size=(600, 5)) + 2.5 * np.eye(5)[truth]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    theirs = cleanlab.find_label_issues(labels, probabilities)
    ours = rivals.label_issues(labels, probabilities)
    assert (ours != theirs).sum() <= 0.05 * ours.sum()


def test_a_rule_that_the_library_lacks_is_named():
    with pytest.raises(ImportError, match="microclip.rules has no Telepathy"):
        rule_named("Telepathy")


# ---- runs


def test_runs_of_a_seed_are_paired_and_repeatable():
    one, two = (run(SHORT, "plain", 1000, 1e-3) for _ in range(2))
    assert one.validation == two.validation
    assert one.test == two.test
    seen = {}
    for name in ("plain", "elr"):
        setup, rows_seen = setup_of(SHORT), []
        inner = ARMS[name].start(setup)

        def watched(rows, batch, inner=inner, rows_seen=rows_seen):
            rows_seen.append(rows)
            inner(rows, batch)

        before = torch.cat([p.detach().flatten() for p in setup.model.parameters()])
        train(setup, lambda _, watched=watched: watched)
        seen[name] = (before, torch.cat(rows_seen))
    assert torch.equal(seen["plain"][0], seen["elr"][0])
    assert torch.equal(seen["plain"][1], seen["elr"][1])


def test_a_function_can_be_run_instead_of_an_arm():
    def variant(setup):
        return lambda rows, batch: setup.losses(batch).mean().backward()

    found = run(SHORT, variant, 1000, 1e-3)
    assert found.arm == "variant"
    assert found.validation == run(SHORT, "plain", 1000, 1e-3).validation


@pytest.mark.parametrize("arm", ["minnorm", "gce", "sce", "elr", "averaging", "co-teaching"])
def test_arms_learn(arm):
    task = dataclasses.replace(DIGITS, name="learning", epochs=6)
    found = run(task, arm, 1000, 2e-3)
    assert found.last > 80
    assert len(found.validation) == 6
    assert {found.best_epoch, 6} <= set(found.test)


@pytest.mark.parametrize(
    "arm",
    [
        "loss-history",
        pytest.param("norm-history", marks=pytest.mark.full),
        pytest.param("loss-history-unit", marks=pytest.mark.full),
    ],
)
def test_rules_with_memory_hold_back_wrong_labels(arm):
    task = dataclasses.replace(DIGITS, name="memory", epochs=20)
    found = run(task, arm, 1000, 2e-3)
    assert found.notes["wrong_held"] > 60
    assert found.notes["right_held"] < 20


def test_cleaning_leaves_out_wrong_labels():
    task = dataclasses.replace(DIGITS, name="cleaning", epochs=8)
    found = run(task, "cleaning", 1000, 1e-3, plain_rate=2e-3)
    assert 0.1 < found.notes["left_out"] < 0.35
    assert found.last > 85


def test_tuning_runs_do_not_look_at_test_data():
    found = run(SHORT, "plain", 100, 1e-3, tested=False)
    assert found.stage == "tune"
    assert found.test == {}


def test_diverged_training_is_recorded_as_such():
    found = run(TASKS["regression-7"], "plain", 1000, 1e30)
    assert found.last_validation == found.last == -math.inf
    assert Record.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))).last == (
        -math.inf
    )


def test_unknown_names_are_listed():
    with pytest.raises(ValueError, match="no task 'digit'.*digits-20"):
        task_named("digit")
    with pytest.raises(ValueError, match="no arm 'erl'.*elr"):
        run("digits-20", "erl", 1000, 1e-3)


# ---- tuning


def test_seeds_are_used_for_one_thing_only():
    assert not set(TUNING_SEEDS) & set(EVALUATION_SEEDS)
    assert not set(TUNING_SEEDS) & set(DEVELOPMENT_SEEDS)
    assert not set(EVALUATION_SEEDS) & set(DEVELOPMENT_SEEDS)


@pytest.mark.parametrize("best", [-4, 0, 3, HIGHEST])
def test_the_search_ends_with_both_neighbors_of_the_best(best):
    scores = {}
    for _ in range(20):
        for k in next_rates(scores, 0):
            scores[k] = -abs(k - best)
        if not next_rates(scores, 0):
            break
    assert best_of(scores, 0) == best
    assert {best - 1, best, min(best + 1, HIGHEST)} <= set(scores)
    assert len(scores) <= abs(best) + 3


def test_equal_scores_keep_the_start():
    assert best_of({-1: 5.0, 0: 5.0, 1: 5.0}, 0) == 0
    assert best_of({-1: 5.0, 0: 4.0, 1: 5.0}, 0) == -1


def fake(job, plain_rate=None, *, gains=None, best=None):
    """Return a record whose metric falls with the distance from the best rate."""
    gain = (gains or {}).get(job.arm, 0.0)
    distance = abs(math.log2(job.rate / rate_of((best or {}).get(job.arm, 0))))
    value = 80.0 + job.seed % 7 + gain * (1 + 0.1 * (job.seed % 2)) - distance
    validation = [value - 1, value]
    tested = job.stage == "evaluate"
    test = {1: value + 0.5, 2: value} if tested else {}
    return Record(job.task, job.arm, job.stage, job.rate, job.seed, "1.1", validation, test)


def finished(plan, **options):
    """Return the records of a plan that was done with made-up results, and the order of jobs."""
    records, jobs = {}, []
    while missing := plan.missing(records):
        jobs += missing
        records |= {job: fake(job, **options) for job in missing}
    return records, jobs


def test_plans_tune_plain_first_and_start_the_others_there():
    plan = Plan([DIGITS], ["elr"], 3)
    assert {job.arm for job in plan.missing({})} == {"plain"}
    records, jobs = finished(plan, best={"plain": 2, "elr": 3})
    assert tuned(records, DIGITS, "plain").rate == 0.004
    assert tuned(records, DIGITS, "elr").rate == 0.008
    first = next(job for job in jobs if job.arm == "elr")
    assert first.rate == 0.002  # half of plain's
    assert not tuned(records, DIGITS, "elr").is_at_edge
    assert plan.untuned(records) == []
    assert status(plan, records).share == 1


def test_no_evaluation_seed_is_tuned_with_and_no_tuning_seed_evaluated():
    _, jobs = finished(Plan([DIGITS, TASKS["mixture-7"]], ["elr", "oracle"], 8))
    assert {job.seed for job in jobs if job.stage == "tune"} == set(TUNING_SEEDS)
    assert {job.seed for job in jobs if job.stage == "evaluate"} == set(range(8))


def test_tuning_does_not_depend_on_evaluation_records():
    plan = Plan([DIGITS], [], 3, evaluating=False)
    records, _ = finished(plan, best={"plain": 1})
    before = tuned(records, DIGITS, "plain")
    for rate, seed in ((rate_of(5), 0), (rate_of(5), 1)):
        job = Job("digits-20", "plain", "evaluate", rate, seed)
        records[job] = Record(*dataclasses.astuple(job), "1.1", [999.0], {1: 999.0})
    assert tuned(records, DIGITS, "plain") == before


# ---- records and the runner


def only_one(job, plain_rate, ends_at):
    if job.rate == ends_at:
        raise RuntimeError("the machine is on fire")
    return fake(job)


def test_finished_runs_are_kept_when_others_fail_and_resuming_does_the_rest(tmp_path):
    plan, records = Plan([DIGITS], [], 2), {}
    with pytest.raises(FailedRunsError, match=r"2 runs failed.*on fire"):
        work(plan, records, tmp_path, 1, lambda _: None, partial(only_one, ends_at=0.002))
    kept = read_all(tmp_path, editions(TASKS.values()))
    assert kept.keys() == records.keys()
    assert {job.rate for job in kept} == {0.0005, 0.001}
    work(plan, kept, tmp_path, 1, lambda _: None, partial(only_one, ends_at=None))
    lines = (tmp_path / "digits-20.jsonl").read_text().splitlines()
    assert len(lines) == len(kept) == 3 * 2 + 2  # nothing was run twice
    assert not plan.missing(kept)
    assert multiprocessing.active_children() == []


def endless(job, plain_rate, told):
    (told / "pid").write_text(str(os.getpid()))
    threading.Event().wait()


def work_forever(folder):
    work(Plan([DIGITS], [], 2), {}, folder, 1, lambda _: None, partial(endless, told=folder))


@pytest.mark.full
def test_workers_end_when_their_parent_is_killed(tmp_path):
    parent = multiprocessing.get_context("spawn").Process(target=work_forever, args=(tmp_path,))
    parent.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert parent.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    worker = psutil.Process(int((tmp_path / "pid").read_text()))
    parent.kill()
    parent.join()
    psutil.wait_procs([worker], timeout=30)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_a_line_that_was_cut_off_costs_one_run(tmp_path):
    jobs = [Job("digits-20", "plain", "tune", 0.001, seed) for seed in TUNING_SEEDS]
    for job in jobs:
        append(tmp_path, fake(job))
    path = tmp_path / "digits-20.jsonl"
    path.write_text(path.read_text()[:-40])
    known = editions(TASKS.values())
    assert list(read_all(tmp_path, known)) == jobs[:1]
    append(tmp_path, fake(jobs[1]))
    assert list(read_all(tmp_path, known)) == jobs


def test_records_of_an_older_edition_do_not_count(tmp_path):
    job = Job("digits-20", "plain", "tune", 0.001, 100)
    append(tmp_path, dataclasses.replace(fake(job), edition="0.1"))
    assert read_all(tmp_path, editions(TASKS.values())) == {}


def test_a_record_survives_its_file(tmp_path):
    record = fake(Job("digits-20", "plain", "evaluate", 0.001, 5))
    append(tmp_path, record)
    (found,) = read_all(tmp_path, editions(TASKS.values())).values()
    assert found == record


# ---- tables


def test_the_table_on_made_up_records():
    gains = {"oracle": 4.0, "elr": 2.0, "gce": -1.0}
    plan = Plan([DIGITS], ["oracle", "elr", "gce"], 4)
    records, _ = finished(plan, gains=gains)
    summary = summarize(records, [DIGITS], 4)
    (task,) = summary["tasks"]
    # gains of elr: 2, 2.2, 2, 2.2; their mean 2.1, deviation 0.11547, t(3) = 3.1824
    half = 3.182446 * 0.1154701 / 2
    elr = task["arms"]["elr"]["gain"]
    assert (elr["mean"], elr["low"], elr["high"]) == pytest.approx((2.1, 2.1 - half, 2.1 + half))
    assert task["has_headroom"]
    assert task["arms"]["elr"]["share"] == pytest.approx(50)
    assert task["arms"]["gce"]["share"] == pytest.approx(-25)
    # plain at its best noisy checkpoint, the last, is what it is at the last step
    assert task["arms"]["elr"]["gain_over_early_stopped_plain"]["mean"] == pytest.approx(2.1)
    overall = summary["overall"]
    assert overall["elr"]["mean_share"] == pytest.approx(50)
    assert (overall["elr"]["gains"], overall["gce"]["gains"], overall["gce"]["losses"]) == (1, 0, 1)
    text = markdown(json.loads(json.dumps(summary, allow_nan=False)))
    assert "| ELR | 0.001 | 83.60 | **+2.10 ± 0.18** (50 %) |" in text


def test_early_stopping_takes_the_epoch_that_is_best_on_noisy_data():
    validation, test = [5.0, 9.0, 9.0, 7.0], {2: 1.0, 4: 3.0}
    record = Record("t", "plain", "evaluate", 1e-3, 0, "1.1", validation, test)
    assert (record.best_epoch, record.early_stopped, record.last) == (2, 1.0, 3.0)


def test_no_share_without_headroom_and_no_interval_of_diverged_runs():
    plan = Plan([DIGITS], ["oracle", "elr"], 4)
    records, _ = finished(plan)
    job = Job("digits-20", "elr", "evaluate", 0.001, 2)
    records[job] = dataclasses.replace(records[job], test={1: math.nan, 2: math.nan})
    (task,) = summarize(records, [DIGITS], 4)["tasks"]
    assert not task["has_headroom"]
    assert task["arms"]["elr"]["share"] is None
    assert task["arms"]["elr"]["gain"] is None
    assert task["arms"]["elr"]["diverged"] == 1
    assert "diverged" in markdown(summarize(records, [DIGITS], 4))


# ---- the whole


def test_every_task_has_its_arms():
    assert {task.purpose for task in TASKS.values()} == {"noisy", "clean", "failure"}
    assert sum(task.purpose == "noisy" for task in TASKS.values()) == 14
    assert sum(task.purpose == "clean" for task in TASKS.values()) == 6
    for task in TASKS.values():
        names = [arm.name for arm in arms_of(task)]
        assert names[0] == "plain"
        assert ("oracle" in names) is (task.purpose != "clean")
        assert {"minnorm", "unit", "loss-history", "norm-history"} <= set(names)
        assert ("elr" in names) is (task.kind == "classification")
        assert ("l1" in names) is (task.kind == "regression")
    known = {name for arm in ARMS.values() for name in arm.only}
    assert known <= set(TASKS)


def test_the_command_refuses_what_makes_no_sense(tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    for arguments, said in (
        (["--tasks", "digit"], "There is no task 'digit'"),
        (["--arms", "erl"], "there is no arm 'erl'"),
        (["--seeds", "1"], "--seeds must be from 2 to 100, but got 1"),
        (["--workers", "0"], "--workers must be 1 or more"),
        (["--stage", "evaluate", "--tasks", "digits-20"], "run --stage tune first"),
    ):
        with pytest.raises(SystemExit) as stop:
            main([*arguments, *out])
        assert stop.value.code == 2
        assert said in capsys.readouterr().err
    main(["--stage", "table", *out])
    assert "no table" in capsys.readouterr().out
    main(["--list"])
    assert "co-teaching: co-teaching" in capsys.readouterr().out


@pytest.mark.full
def test_the_command_from_end_to_end(tmp_path):
    arguments = ["--tasks", "digits-short", "--arms", "elr", "--seeds", "2", "--out", str(tmp_path)]
    main([*arguments, "--workers", "1"])
    before = (tmp_path / "digits-short.jsonl").read_text()
    main([*arguments, "--workers", "2"])
    assert (tmp_path / "digits-short.jsonl").read_text() == before
    table = json.loads((tmp_path / "table.json").read_text())
    assert set(table["tasks"][0]["arms"]) == {"plain", "elr"}
    assert "ELR" in (tmp_path / "table.md").read_text()
