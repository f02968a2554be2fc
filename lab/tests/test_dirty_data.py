"""The dirty-data benchmark: what is wrong is wrong, rivals are as published, nothing is lost."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from microclip_lab.dirty_data import rivals, run
from microclip_lab.dirty_data.arms import ARMS, rule_named
from microclip_lab.dirty_data.catalog import TASKS, task_named
from microclip_lab.dirty_data.records import Record
from microclip_lab.dirty_data.speech_tasks import recordings, speech_data
from microclip_lab.dirty_data.synthetic_tasks import mixture_data, regression_data
from microclip_lab.dirty_data.task import mislabeled
from microclip_lab.dirty_data.text_tasks import (
    LENGTH,
    NextCharacter,
    document_losses,
    documents,
    language_data,
)
from microclip_lab.dirty_data.training import Setup, train
from microclip_lab.dirty_data.vision_tasks import digits_data
from microclip_lab.language import vader
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


@pytest.mark.parametrize("damage", ["garbage", "misaligned"])
def test_damaged_documents_are_those_marked_wrong(damage, monkeypatch):
    draw = np.random.default_rng(0)
    texts = ["".join(draw.choice(list("abcdefgh "), size=60)) for _ in range(2000)]
    found = [
        vader.Sentence(f"tweets-{i}", "tweets", text, 1.0, (1,)) for i, text in enumerate(texts)
    ]
    monkeypatch.setattr(vader, "sentences", lambda: found)
    documents.cache_clear()
    try:
        clean = language_data(7, 0.0, "none", 256)
        dirty = language_data(7, 0.25, damage, 256)
    finally:
        documents.cache_clear()
    assert int(dirty.wrong.sum()) == 64
    differ = (dirty.training.targets != clean.training.targets).any(1)
    assert torch.equal(differ, dirty.wrong)
    assert (dirty.validation.targets != clean.validation.targets).any(1).sum() == 128
    assert torch.equal(dirty.test.targets, clean.test.targets)
    if damage == "misaligned":  # the inputs are as they were
        assert torch.equal(dirty.training.inputs, clean.training.inputs)


@pytest.mark.full
def test_wrong_transcripts_are_those_marked_wrong():
    features, transcripts = recordings()
    data = speech_data(7, 0.1)
    rows = [int((features == one).all(2).all(1).nonzero()[0]) for one in data.training.inputs]
    differ = (data.training.targets != transcripts[rows]).any(1)
    assert torch.equal(differ, data.wrong)
    assert int(data.wrong.sum()) == round(0.1 * len(data.training))


def test_the_loss_of_a_document_is_its_mean():
    outputs = torch.zeros(2, 4, 3)
    outputs[0, 1, :] = 100.0
    found = document_losses(outputs, torch.tensor([[1, 1, 1], [0, 1, 2]]))
    assert found.tolist() == pytest.approx([0.0, math.log(4)])


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
