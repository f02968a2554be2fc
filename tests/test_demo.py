"""The demo: its data, one run, the plan, the cache."""

import json
import os
from dataclasses import replace

import pytest
import torch

from microclip.demo.cache import Cache
from microclip.demo.config import TUNING_SEEDS, DemoConfig
from microclip.demo.data import load, mislabel
from microclip.demo.plan import (
    FIRST_RATES,
    RATES,
    best_rate,
    chosen_rate,
    expected,
    missing,
    rates_to_try,
)
from microclip.demo.train import (
    Result,
    Run,
    WeightTally,
    accuracy,
    batches,
    carry_out,
    fit,
    network,
)

from demo_runs import SHORT, SMALL, TRUTH, made_up


def places(images) -> set[int]:
    return set(images.places.tolist())


# ---------------------------------------------------------------------------------------- data


@pytest.mark.parametrize(("noise", "wrong"), [(0.0, 0), (0.2, 180), (0.333, 300), (1.0, 900)])
def test_noise_is_exact_and_in_training_labels_only(noise, wrong):
    digits = load(seed=7, noise=noise)
    differs = digits.training.labels != TRUTH[digits.training.places]
    assert differs.sum() == wrong
    assert torch.equal(differs, digits.wrong)
    for clean in (digits.validation, digits.test):
        assert torch.equal(clean.labels, TRUTH[clean.places])


def test_wrong_labels_are_drawn_from_all_the_others():
    given, wrong = mislabel(torch.full((9000,), 4).numpy(), noise=1.0, seed=0)
    counts = torch.bincount(torch.tensor(given), minlength=10)
    assert wrong.all()
    assert counts[4] == 0
    assert counts.sum() == 9000
    assert all(900 < count < 1100 for count in counts[torch.arange(10) != 4].tolist())


def test_no_image_that_is_chosen_by_is_ever_tested_on():
    first, second = load(seed=1, noise=0.2), load(seed=2, noise=0.2)
    assert places(first.validation) == places(second.validation)
    assert places(first.test) != places(second.test)
    for digits in (first, second):
        parts = places(digits.training), places(digits.validation), places(digits.test)
        assert [len(part) for part in parts] == [900, 297, 600]
        assert len(set.union(*parts)) == 1797


def test_splits_are_stratified_and_scaled():
    digits = load(seed=1, noise=0.2)
    for images in (digits.validation, digits.test):
        shares = torch.bincount(images.labels) / len(images.labels)
        assert torch.allclose(shares, torch.bincount(TRUTH) / len(TRUTH), atol=0.004)
    assert digits.training.pixels.mean().abs() < 1e-5
    assert (digits.training.pixels.std() - 1).abs() < 1e-3


# ------------------------------------------------------------------------------------- one run


def test_the_whole_batch_as_one_microbatch_is_plain_training_bit_for_bit():
    digits = load(SHORT.seed, SHORT.noise)
    plain, no_tally = fit(SHORT, digits)
    whole, _ = fit(replace(SHORT, setting=32), digits)
    clipped, _ = fit(replace(SHORT, setting=4), digits)
    assert no_tally is None
    for name, weights in plain.state_dict().items():
        assert torch.equal(weights, whole.state_dict()[name])
        assert not torch.equal(weights, clipped.state_dict()[name])


def test_settings_of_a_seed_share_network_and_order_and_seeds_do_not():
    other = replace(SHORT, seed=4)
    assert torch.equal(batches(900, SHORT), batches(900, replace(SHORT, setting=2)))
    assert not torch.equal(batches(900, SHORT), batches(900, other))
    same = zip(network(3).parameters(), network(3).parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in same)
    assert not torch.equal(next(network(3).parameters()), next(network(4).parameters()))


def test_a_run_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    carry_out(replace(SHORT, setting=8, steps=1))
    assert torch.equal(before, torch.get_rng_state())


def test_an_epoch_has_each_image_at_most_once():
    order = batches(900, replace(SHORT, steps=30))
    assert order.shape == (30, 32)
    assert len(set(order[:28].flatten().tolist())) == 28 * 32
    assert len(set(order[28:].flatten().tolist())) == 2 * 32


def test_training_learns():
    digits = load(seed=1, noise=0.0)
    run = Run(4, 3e-3, seed=1, steps=60, batch_size=32, noise=0.0)
    model, _ = fit(run, digits)
    assert accuracy(network(1), digits.test) < 0.3
    assert accuracy(model, digits.test) > 0.8


def test_weights_are_added_up_by_the_number_of_wrong_labels():
    tally = WeightTally(microbatch_size=2)
    wrong = torch.tensor([False, False, True, False, True, True])
    tally.add(torch.tensor([1.0, 0.5, 0.0]), wrong)  # 2, 1 and 0 times the mean
    tally.add(torch.tensor([1.0, 1.0, 1.0]), wrong)
    tally.add(torch.tensor([torch.nan, 1.0, 1.0]), wrong)  # diverged: not counted
    assert tally.weights.tolist() == [3, 2, 1]
    assert tally.microbatches.tolist() == [2, 2, 2]


# ---------------------------------------------------------------------------------------- plan


def test_rates_begin_with_the_first_and_grow_beyond_a_best_on_the_edge():
    assert rates_to_try({}) == list(FIRST_RATES)
    assert rates_to_try({1e-3: 0.9}) == [3e-3, 1e-2]
    assert rates_to_try({1e-3: 0.8, 3e-3: 0.9, 1e-2: 0.8}) == []
    assert rates_to_try({1e-3: 0.9, 3e-3: 0.8, 1e-2: 0.7}) == [3e-4]
    assert rates_to_try({1e-3: 0.7, 3e-3: 0.8, 1e-2: 0.9}) == [3e-2]
    assert rates_to_try({1e-3: 0.7, 3e-3: 0.8, 1e-2: 0.9, 3e-2: 0.8}) == []
    assert rates_to_try(dict.fromkeys(RATES, 0.5) | {RATES[-1]: 0.9}) == []  # nothing beyond


def test_of_equal_rates_the_smallest_is_chosen():
    assert best_rate({3e-3: 0.9, 1e-3: 0.9, 3e-4: 0.8}) == 1e-3


def test_rates_are_chosen_by_validation_accuracy_alone():
    def validation(run: Run) -> float:
        return 1 - abs(run.learning_rate - 3e-2)

    finished = made_up(SMALL, validation, test=lambda run: run.learning_rate)
    other = made_up(SMALL, validation, test=lambda run: 1 - run.learning_rate)
    assert finished.keys() == other.keys()
    assert {chosen_rate(SMALL, setting, finished) for setting in SMALL.settings} == {3e-2}


def test_settings_are_paired_and_the_tuning_seed_is_used_for_nothing_else():
    runs = made_up(SMALL)
    assert SMALL.settings == (None, 2, 4, 32)
    assert not {*TUNING_SEEDS} & {*SMALL.evaluation_seeds}
    for setting in SMALL.settings:
        seeds = [run.seed for run in runs if run.setting == setting]
        assert [s for s in seeds if s not in TUNING_SEEDS] == list(SMALL.evaluation_seeds)
    assert set(expected(SMALL, runs)) == set(runs)
    assert missing(SMALL, runs) == []


def test_long_runs_come_first():
    works = [run.work for run in missing(SMALL, {})]
    assert works == sorted(works, reverse=True)
    assert works[0] == 10 * (1 + 16)
    assert works[-1] == 10


def test_all_cores_are_used_unless_told():
    assert SMALL.processes == 2
    assert 1 <= DemoConfig().processes <= (os.cpu_count() or 1)


# --------------------------------------------------------------------------------------- cache


def test_runs_are_kept_and_a_torn_line_is_passed_over(tmp_path):
    cache = Cache(tmp_path / "runs.jsonl")
    assert cache.load() == {}
    result = Result(0.5, 0.25, (1.5, 0.5), (3, 4))
    runs = [replace(SHORT, seed=seed) for seed in range(3)]
    cache.add(runs[0], result)
    cache.add(runs[1], Result(0.1, 0.2))
    assert cache.load() == {runs[0]: result, runs[1]: Result(0.1, 0.2)}

    whole = cache.path.read_bytes()
    cache.path.write_bytes(whole[:-20])
    assert cache.load() == {runs[0]: result}
    cache.add(runs[2], result)  # is not lost with the torn line before it
    assert cache.load() == {runs[0]: result, runs[2]: result}
    cache.clear()
    assert cache.load() == {}


def test_only_runs_of_the_same_recipe_count(tmp_path):
    cache = Cache(tmp_path / "runs.jsonl")
    cache.add(SHORT, Result(0.5, 0.5))
    line = json.loads(cache.path.read_text())
    for change in ({"recipe": line["recipe"] | {"torch": "0.1"}}, {"run": {"setting": 3}}):
        cache.path.write_text(json.dumps(line | change) + "\n")
        assert cache.load() == {}
    cache.path.write_text(json.dumps(line) + "\n[]\n")
    assert list(cache.load()) == [SHORT]


@pytest.mark.parametrize("field", ["setting", "learning_rate", "seed", "steps", "noise"])
def test_a_run_is_known_by_all_its_settings(field, tmp_path):
    cache = Cache(tmp_path / "runs.jsonl")
    cache.add(SHORT, Result(0.5, 0.5))
    assert replace(SHORT, **{field: 2}) not in cache.load()
