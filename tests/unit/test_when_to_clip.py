"""When to clip: figures that need no knowledge of bad examples, and what is said about them."""

import dataclasses
import math

import pytest
import torch

import microclip
from microclip import rules
from microclip.probing import advice
from microclip.probing.forecast import RISE, SMALLEST, TOP_TENTH, Forecast, Thumb, described
from microclip.probing.inequality import inequality, smallest_over_mean, top_tenth_share
from microclip.probing.thresholds import BY_KIND, FORECASTS
from microclip.report.write import read_findings

GOOD = Forecast("MinNorm", Thumb(SMALLEST, 0.1, 0.2), 6, 20, 15, "gain", 11, 0.04)


def orthogonal(*norms):
    return torch.tensor(norms, dtype=torch.float64).square().diag()


def test_shares_by_hand():
    assert top_tenth_share(torch.tensor([9.0] + 9 * [1.0])) == 0.5
    assert top_tenth_share(torch.ones(30)) == pytest.approx(0.1)
    assert top_tenth_share(torch.zeros(10)) == 0.0


def test_the_smallest_norm_by_hand():
    draw = torch.Generator().manual_seed(0)
    # both micro-batches of one: norms 3 and 4
    assert smallest_over_mean(orthogonal(3, 4), 2, 1, draw) == pytest.approx(3 / 3.5)
    assert smallest_over_mean(orthogonal(*16 * [1.0]), 16, 4, draw) == pytest.approx(1)


def test_batches_of_one_micro_batch_have_no_smallest_norm():
    assert set(inequality(orthogonal(*range(1, 9)), 7)) == {TOP_TENTH}
    assert set(inequality(orthogonal(*range(1, 9)), 8)) == {TOP_TENTH, SMALLEST}


def test_a_forecast_that_beats_guessing_says_what_to_expect_and_how_often_it_was_right():
    for value, words in ((0.05, "expect harm"), (0.15, "no difference"), (0.3, "expect a gain")):
        said = GOOD.sentence({SMALLEST: value})
        assert words in said
        assert "right on 15 of 20 tasks that it was not fitted on" in said
        assert said.endswith("better than guessing.")
    luck = dataclasses.replace(GOOD, luck=0.2).sentence({SMALLEST: 0.3})
    assert "expect a gain" in luck
    assert "perhaps luck (p = 0.20)" in luck


@pytest.mark.parametrize("right", [5, 11])
def test_one_that_does_not_predicts_nothing(right):
    said = dataclasses.replace(GOOD, right=right).sentence({SMALLEST: 0.3})
    assert "expect" not in said
    assert "these figures do not tell" in said
    assert f"right on {right} of 20" in said
    assert said.endswith("no better than guessing.")


def test_without_a_fit_or_its_figure_nothing_is_predicted():
    assert "only 3 tasks" in Forecast("Unit", None, 3).sentence({SMALLEST: 0.3})
    said = dataclasses.replace(GOOD, thumb=Thumb(RISE, 0.0, 0.1)).sentence({SMALLEST: 0.3})
    assert "expect" not in said
    assert "ProbeEvery" in said


def test_every_published_forecast_can_be_put_into_words():
    assert [each.rule for each in FORECASTS] == ["MinNorm", "Unit"]
    for each in FORECASTS:
        assert each.right <= each.judged_on
        assert each.guess_right <= each.judged_on
        assert not math.isnan(each.luck)
    figures = {TOP_TENTH: 0.5, SMALLEST: 0.2, RISE: 0.1}
    found = advice.suggestions(figures)
    assert found[0] == described(figures)
    assert len(found) == (1 + len(FORECASTS) if advice.is_trusted() else 2)
    assert len(advice.by_kind()) == len(BY_KIND) >= 6


def test_forecasts_that_do_not_beat_guessing_point_to_the_table_by_kind():
    figures = {SMALLEST: 0.3}
    assert "expect a gain" in advice.suggestions(figures, [GOOD])[1]
    worse = dataclasses.replace(GOOD, right=8)
    for forecasts, why in (
        ([worse], 'MinNorm right on 8 of 20 (always saying "gain": 11)'),
        ([Forecast("Unit", None, 3)], "too few tasks"),
    ):
        _, said = advice.suggestions(figures, forecasts)
        assert why in said
        assert "expect" not in said
        assert said.endswith("/docs/when-to-use.md.")


@pytest.mark.parametrize(("b", "told"), [(4, "smallest micro-batch norm"), (1, "top tenth")])
def test_a_report_says_what_the_norms_of_its_ledger_suggest(b, told, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    x = torch.randn(64, 3)
    with microclip.Ledger(tmp_path / "ledger") as ledger:
        clipper = microclip.Clipper(model, microbatch_size=b, rule=rules.Keep(), ledger=ledger)
        outcomes = [
            clipper.backward(lambda rows: model(x[rows]).squeeze(1).square(), rows, ids=rows)
            for rows in 4 * torch.arange(64).split(16)
        ]
    summary = read_findings([tmp_path / "ledger"]).summary
    (said,) = [line for line in summary if line.startswith("A quarter into the run: ")]
    assert told in said
    assert suggestions_end(said)
    if b == 4:
        norms = outcomes[4].norms  # the weights do not change, nor do batches from epoch to epoch
        assert f"is {float(norms.min() / norms.mean()):.2f} of the mean" in said


def suggestions_end(said):
    return said.endswith(advice.suggestions({})[-1]) or "Forecasts were fitted" in said


def test_other_sizes_say_nothing(tmp_path):
    model = torch.nn.Linear(3, 1)
    with microclip.Ledger(tmp_path / "ledger") as ledger:
        clipper = microclip.Clipper(model, microbatch_size=2, ledger=ledger)
        for rows in torch.randn(8, 8, 3):
            clipper.backward(lambda x: model(x).squeeze(1).square(), rows, ids=range(8))
    summary = read_findings([tmp_path / "ledger"]).summary
    assert not [line for line in summary if "quarter into the run" in line]


def test_repeated_probes_know_how_the_share_rose():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    watch = microclip.ProbeEvery(1, draws=8, replicates=8)
    assert watch.suggestions == []
    for scale in (1.0, 9.0):
        batch = torch.randn(40, 3)
        batch[:4] *= scale
        watch.step(model, lambda x: model(x).squeeze(1).square(), batch)
    first, second = (moment.figures for moment in watch.history)
    assert RISE not in first
    assert second[RISE] == second[TOP_TENTH] - first[TOP_TENTH] > 0.1
    assert "points since the first look" in watch.suggestions[0]
    assert str(watch).startswith(watch.suggestions[0])
