"""`engine="auto"`: chooses an engine on real batches, without ever changing the result."""

import logging
import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from microclip import Clipper, rules
from microclip.engines import select

import properties
import reference
import zoo
from hidden import Hidden


def classes(model, reduction="none"):
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)


def batch(size=8, width=4):
    return torch.randn(size, width), torch.randint(0, 3, (size,))


def gradient(model):
    return [p.grad for p in model.parameters()]


@pytest.mark.sample(3)
@pytest.mark.parametrize("model", zoo.MODELS)
@pytest.mark.parametrize("rule", ["MinNorm()", "Median(rescale=False)"])
def test_exact_whatever_it_chooses(model, rule):
    """On the first batch, where it tries engines out, and on the next."""
    case = zoo.case(model, torch.float32)
    loss_fn = case.each_loss_fn or case.loss_fn
    gradients, sizes, _ = properties.stored_gradients(model, torch.float32, 2, False, each=True)
    wanted, _, _ = reference.clipped_gradient(gradients, sizes, reference.WEIGH[rule])
    clipper = Clipper(case.model, 2, rule=properties.RULES[rule])
    before = [buffer.clone() for buffer in case.model.buffers()]
    for _ in range(2):
        case.model.zero_grad()
        outcome = clipper.backward(loss_fn, case.batch)
        properties.assert_close([p.grad for p in case.parameters], wanted, 1e-5)
        assert outcome.engine == clipper.engine_report.engine
    if model in zoo.CANNOT_FUSE:
        assert zoo.CANNOT_FUSE[model] in clipper.engine_report.reason
    else:
        assert clipper.engine_report.error < 1e-5
        assert set(clipper.engine_report.seconds) > {"fused"}
    for buffer, was in zip(case.model.buffers(), before, strict=True):
        if buffer.dtype == torch.int64 and buffer.dim() == 0:  # BatchNorm counts batches
            assert buffer == was + 2 * len(sizes)
    case.model.zero_grad()


def test_mixed_examples_are_noticed(caplog):
    model = nn.Linear(4, 3)
    clipper = Clipper(model, 2)

    def loss_fn(batch):
        return F.cross_entropy(model(batch[0] - batch[0].mean(0)), batch[1], reduction="none")

    data = batch()
    for _ in range(2):
        assert clipper.backward(loss_fn, data).engine == "stream"
    assert "mean(), which mixes examples" in clipper.engine_report.reason
    (record,) = caplog.records  # said once
    assert record.levelname == "WARNING"
    assert "mixes examples" in record.message


def test_examples_that_are_mixed_out_of_sight_are_noticed():
    """By a number that was read on the host, which no tensor shows."""
    model = nn.Linear(4, 3)
    clipper = Clipper(model, 2)

    def loss_fn(batch):
        largest = batch[0].abs().max().item()
        return F.cross_entropy(model(batch[0] / largest), batch[1], reduction="none")

    data = batch()
    with pytest.warns(RuntimeWarning, match="most in parameter '.*Using the stream engine"):
        outcome = clipper.backward(loss_fn, data)
    assert outcome.engine == "stream"
    assert clipper.engine_report.suspect in ("weight", "bias")
    clipper.backward(loss_fn, data)  # and not again


def test_examples_along_another_dimension_are_no_obstacle():
    model = nn.Linear(4, 3)

    def loss_fn(batch):  # (positions, examples, features) inside, and as many of both
        hidden = model(batch[0].transpose(0, 1)).mean(0)
        return F.cross_entropy(hidden, batch[1], reduction="none")

    clipper = Clipper(model, 2)
    clipper.backward(loss_fn, (torch.randn(8, 8, 4), torch.randint(0, 3, (8,))))
    assert clipper.engine_report.error < 1e-5


def test_dropout_is_held_still_for_the_comparison_only():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(32, 3), nn.Dropout(0.5))
    data = torch.randn(8, 4, 8), torch.randint(0, 3, (8,))
    clipper = Clipper(model, 2)
    first = clipper.backward(classes(model), data)
    assert clipper.engine_report.error < 1e-5
    second = clipper.backward(classes(model), data)
    assert first.loss != second.loss  # two masks


def test_randomness_that_cannot_be_held_still():
    model = nn.Linear(4, 3)
    clipper = Clipper(model, 2)
    state = torch.get_rng_state()
    clipper.backward(
        lambda b: F.cross_entropy(model(b[0] + torch.randint(9, (1,))), b[1], reduction="none"),
        batch(),
    )
    assert "cannot be fixed" in clipper.engine_report.reason
    assert not torch.equal(torch.get_rng_state(), state)


def test_no_verdict_from_gradients_that_are_not_finite():
    model = nn.Linear(4, 3)
    clipper = Clipper(model, 2)
    x, y = batch()
    outcome = clipper.backward(classes(model), (x * torch.nan, y))
    assert outcome.engine == "stream"
    assert "not finite" in clipper.engine_report.reason
    clipper.backward(classes(model), (x, y))
    assert clipper.engine_report.error < 1e-5


def test_tries_again_when_batches_change_a_lot():
    model = nn.Linear(4, 3)
    clipper = Clipper(model, 2)
    reports = []
    for size in (64, 40, 8, 64):
        clipper.backward(classes(model), batch(size))
        reports.append(clipper.engine_report)
    assert reports[0] is reports[1]
    assert reports[1] is not reports[2]  # the small last batch of an epoch, say,
    assert reports[3] is reports[0]  # which does not decide for the others


def test_mean_losses_stream():
    model = nn.Linear(4, 3)
    clipper = Clipper(model, 2)
    assert clipper.engine_report is None
    assert clipper.backward(classes(model, "mean"), batch()).engine == "stream"
    assert "one loss per example" in clipper.engine_report.reason


def test_the_users_own_error_comes_through():
    model = nn.Linear(4, 3)
    with pytest.raises(ZeroDivisionError):
        Clipper(model, 2).backward(lambda batch: 1 / 0, batch())
    assert all(p.grad is None for p in model.parameters())


def test_one_microbatch_and_own_backward_calls_need_no_trial():
    model = nn.Linear(4, 3)
    clipper = Clipper(model)
    clipper.backward(classes(model), batch())
    classes(model, "mean")(batch()).backward()
    clipper.fold()
    clipper.finish()
    assert clipper.engine_report is None


def test_the_choice_is_logged_once(caplog):
    model = nn.Linear(4, 3)
    clipper = Clipper(model, 2)
    with caplog.at_level(logging.INFO, logger="microclip"):
        for _ in range(3):
            clipper.backward(classes(model), batch())
    (record,) = caplog.records
    assert f'engine="auto" uses {clipper.engine_report.engine}' in record.message


def test_rules_are_not_told_of_trials():
    class Counting(rules.MinNorm):
        seen = 0

        def observe(self, norms, sizes):
            type(self).seen += 1

    model = nn.Linear(4, 3)
    Clipper(model, 2, rule=Counting()).backward(classes(model), batch())
    assert Counting.seen == 1


def test_compiled_models_are_no_obstacle():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own deprecations
        compiled = torch.compile(model, backend="aot_eager")
        data = batch()
        outcome = Clipper(compiled, 2).backward(classes(compiled), data)
        found = [g.clone() for g in gradient(model)]
    model.zero_grad()
    Clipper(model, 2, engine="stream").backward(classes(model), data)
    properties.assert_close(found, gradient(model), 1e-5)
    assert outcome.engine in ("stream", "fused")


def test_a_rare_branch_that_cannot_be_fused_does_not_end_a_run(caplog):
    """Once the single pass is chosen, a later batch may still need another engine."""
    layer, head = nn.Linear(4, 4), nn.Linear(4, 3)
    model = nn.ModuleList([layer, head])

    def loss_fn(batch):
        x, y, rare = batch
        hidden = x
        if rare.any():
            with torch.autograd.graph.save_on_cpu():
                hidden = layer(x)
        hidden = hidden[:, -1]
        return F.cross_entropy(head(hidden), y, reduction="none")

    data = torch.randn(8, 5, 4), torch.randint(0, 3, (8,)), torch.zeros(8, dtype=torch.bool)
    clipper = Clipper(model, 2)
    clipper.backward(loss_fn, data)
    # timing decides, and either engine may win; here the single pass must have been chosen
    chosen = replace(clipper.engine_report, engine="fused")
    clipper._selector._trials = dict.fromkeys(clipper._selector._trials, chosen)
    model.zero_grad()
    rare = (*data[:2], torch.ones(8, dtype=torch.bool))
    outcome = clipper.backward(loss_fn, rare)
    assert outcome.engine == "stream"
    assert len(outcome) == 4
    assert "hooks on saved tensors" in clipper.engine_report.reason
    assert "from now on" in caplog.text
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    Clipper(model, 2, engine="stream").backward(loss_fn, rare)
    properties.assert_close(found, gradient(model), 1e-6)
    assert clipper.backward(loss_fn, data).engine == "stream"


@pytest.mark.parametrize(("close", "rounds"), [(0.0, 3), (math.inf, 9)])
def test_a_close_race_takes_more_rounds(monkeypatch, close, rounds):
    monkeypatch.setattr(select, "CLOSE", close)
    model, calls = nn.Linear(4, 2), Hidden()  # a list would be put back

    def losses(x):
        calls.calls.append(len(x))
        return model(x).square().mean(1)

    Clipper(model, 3, verify="never").backward(losses, torch.randn(6, 4))
    sizes = calls.calls
    # a look at what the loss is, the trial, in which each round has one pass over all and one over
    # each half, and the step
    step = 1 if sizes[-1] == 6 else 2
    assert len(sizes) == 1 + 3 * rounds + step


def test_a_checkpoint_holds_what_was_found_out(tmp_path):
    """Timed again, it could choose another engine, and a resumed run would differ in its bits."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    first = Clipper(model, 2)
    first.backward(classes(model), batch())
    torch.save(first.state_dict(), tmp_path / "clipper.pt")
    other = "stream" if first.engine_report.engine == "fused" else "fused"
    state = torch.load(tmp_path / "clipper.pt")
    for engine in (first.engine_report.engine, other):
        state["trials"][0]["engine"] = engine
        second = Clipper(model, 2)
        second.load_state_dict(state)
        assert second.backward(classes(model), batch()).engine == engine
        assert second.step == 2


def test_autocast_inside_the_model_is_no_mistake():
    """Rounding to bfloat16 is not taken for mixed examples, wherever autocast is switched on."""

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.body(x).float()

    model = Inside()
    clipper = Clipper(model, 2)
    clipper.backward(classes(model), batch())  # a warning would be an error
    assert 1e-4 < clipper.engine_report.error < 0.05
    assert set(clipper.engine_report.seconds) == {"fused", "stream"}
    assert not nn.modules.module._global_forward_pre_hooks
