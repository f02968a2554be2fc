"""Rules that weight examples, as Lightning's callback: one pass, equal to a slow twin."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from microclip.integrations.lightning import MicrobatchClip
from microclip.rules import LossHistory, LossWeight, MinNorm, NormHistory

import lightning_runs
import properties
import reference
from example_weights import ByKey, corners, weight_of, weighted_mean
from lightning_runs import COUNT, LIGHTNING_WARNINGS, loader, rows_of, trainer

pytestmark = LIGHTNING_WARNINGS


class PerExample(lightning_runs.Model):
    """Returns one loss per example, or a dict with them."""

    def __init__(self, lr=0.0, as_dict=False):
        super().__init__(lr)
        self.as_dict, self.calls = as_dict, 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        self.log("loss", losses.mean())
        return {"loss": losses, "rows": batch[2]} if self.as_dict else losses


def fit(folder, model, rule, size=8, b=None, accumulate=1, **options):
    ids = options.pop("ids", lambda batch: batch[2])
    batches = options.pop("batches", None) or loader(size, torch.arange(COUNT))
    callback = MicrobatchClip(rule, microbatch_size=b, ids=ids, **options.pop("clip", {}))
    run = trainer(folder, [callback], accumulate_grad_batches=accumulate, **options)
    run.fit(model, batches)
    return callback, run


def gradients_of(model, pieces, loss_of):
    """Return the gradient of each list of rows."""
    x, y = lightning_runs.data()

    def loss(rows):
        losses = F.cross_entropy(model.net(x[rows]), y[rows], reduction="none")
        return loss_of(rows, losses)

    return reference.microbatch_gradients(loss, list(model.parameters()), pieces)


def steps_of(size, accumulate):
    batches = rows_of(0, COUNT, size)
    return [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]


def assert_weighted(model, rule, size, accumulate):
    """Check that every step is sum w_i g_i / sum w_i."""
    taken = steps_of(size, accumulate)
    assert len(model.seen) == len(taken) == len(rule.seen)
    for found, parts, seen in zip(model.seen, taken, rule.seen, strict=True):
        rows = [row for part in parts for row in part]
        each = gradients_of(model, [[row] for row in rows], lambda _, losses: losses)
        properties.assert_close(found, weighted_mean(each, list(map(weight_of, rows))), 1e-5)
        assert seen.keys.tolist() == rows
        x, y = lightning_runs.data()
        losses = F.cross_entropy(model.net(x[rows]), y[rows], reduction="none")
        assert seen.losses.tolist() == pytest.approx(losses.tolist(), rel=1e-5)


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize(
    ("size", "accumulate", "b"), [(8, 1, None), (4, 2, None), (8, 1, 2), (8, 2, 3), (8, 1, 100)]
)
def test_a_step_is_the_weighted_mean_of_its_examples(tmp_path, size, accumulate, b, as_dict):
    """Each batch is one pass, whatever the micro-batch size."""
    model, rule = PerExample(as_dict=as_dict), ByKey()
    callback, run = fit(tmp_path, model, rule, size, b, accumulate)
    assert_weighted(model, rule, size, accumulate)
    batches = len(rows_of(0, COUNT, size))
    assert model.calls == batches  # a look at the first micro-batch leaves no trace
    assert callback.clipper.outcome.sizes.tolist() == [
        len(p) for p in steps_of(size, accumulate)[-1]
    ]
    assert run.callback_metrics["microclip/held_back"] == sum(
        weight_of(row) < 0.5 for part in steps_of(size, accumulate)[-1] for row in part
    )


@pytest.mark.parametrize(("size", "accumulate", "b"), [(8, 1, 2), (4, 2, 1)])
def test_a_mean_loss_weights_micro_batches(tmp_path, size, accumulate, b):
    model, rule = lightning_runs.Model(), ByKey()
    fit(tmp_path, model, rule, size, b, accumulate)
    assert len(model.seen) == len(steps_of(size, accumulate))
    for found, parts in zip(model.seen, steps_of(size, accumulate), strict=True):
        pieces = [part[i : i + b] for part in parts for i in range(0, len(part), b)]
        each = gradients_of(model, pieces, lambda _, losses: losses.mean())
        sizes = [sum(map(weight_of, piece)) for piece in pieces]
        properties.assert_close(found, weighted_mean(each, sizes), 1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_micro_batches_of_weighted_examples_are_clipped(tmp_path, accumulate):
    model = PerExample()
    fit(tmp_path, model, ByKey(clip=MinNorm()), 8, 2, accumulate)
    assert len(model.seen) == len(steps_of(8, accumulate))
    for found, parts in zip(model.seen, steps_of(8, accumulate), strict=True):
        pieces = [part[i : i + 2] for part in parts for i in range(0, len(part), 2)]

        def loss_of(rows, losses):
            weights = torch.tensor([weight_of(row) for row in rows])
            return (weights * losses).sum() / weights.sum()

        each = gradients_of(model, pieces, loss_of)
        sizes = [sum(map(weight_of, piece)) for piece in pieces]
        wanted = reference.clipped_gradient(each, sizes, reference.WEIGH["MinNorm()"])[0]
        properties.assert_close(found, wanted, 1e-5)


class Normalized(PerExample):
    """With BatchNorm, dropout, and a counter: all see one pass over the whole batch."""

    def __init__(self, lr=0.1):
        super().__init__(lr)
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)
        )


class NormalizedPlain(Normalized):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).mean()


@pytest.mark.parametrize("b", [None, 2])
def test_equals_plain_lightning_while_all_weights_are_one(tmp_path, b):
    """Bit for bit, although micro-batches would have other statistics and other dropout."""
    options = {"max_epochs": 3, "gradient_clip_val": 0.5}
    torch.manual_seed(1)
    wanted = NormalizedPlain()
    run = trainer(tmp_path, [], accumulate_grad_batches=1, **options)
    torch.manual_seed(2)
    run.fit(wanted, loader(8, torch.arange(COUNT)))
    torch.manual_seed(1)
    found = Normalized()
    torch.manual_seed(2)
    fit(tmp_path, found, LossHistory(total_steps=1000), b=b, **options)
    pairs = zip(found.state_dict().values(), wanted.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert found.calls == wanted.calls == 9


def learnable():
    x, y = corners()
    return DataLoader(TensorDataset(x, y, torch.arange(len(x))), batch_size=16)


LONG = {"max_epochs": 40, "batches": learnable()}


def test_wrong_examples_are_held_back(tmp_path):
    callback, run = fit(tmp_path, PerExample(1.0), LossHistory(), **LONG)
    rule = callback.clipper.policy.rule
    assert rule.phase == "holding", rule.phase
    assert rule.total_steps == 120
    held = (rule.weigh(torch.arange(48), None) < 0.5).nonzero().flatten().tolist()
    assert held == list(range(8))
    assert run.callback_metrics["microclip/held_back"] == 0  # they are in the first batch


def test_resumed_training_is_bit_for_bit_the_same(tmp_path):
    """From a checkpoint in which examples are held back."""

    checkpoint = tmp_path / "half.ckpt"

    class Saving(pl.Callback):
        def on_train_epoch_end(self, trainer, *args):
            if trainer.current_epoch == 29:
                trainer.save_checkpoint(checkpoint)

    def run(callbacks, resumed=None):
        model = PerExample(1.0)
        callback = MicrobatchClip(LossHistory(), ids=lambda batch: batch[2])
        made = trainer(tmp_path, [callback, *callbacks], accumulate_grad_batches=1, max_epochs=40)
        made.fit(model, learnable(), ckpt_path=resumed)
        return model, callback.clipper.policy.rule

    whole, one = run([Saving()])
    saved = torch.load(checkpoint, weights_only=True)["callbacks"]["MicrobatchClip"]
    assert saved["rule"]["phase"] in ("trial", "holding")
    again, other = run([], checkpoint)
    pairs = zip(whole.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert one.fingerprint() == other.fingerprint()
    assert one.total_steps == other.total_steps == 120


def test_the_rule_is_told_how_long_every_fit_takes(tmp_path):
    rule = ByKey()
    callback = MicrobatchClip(rule, ids=lambda batch: batch[2])
    batches = loader(8, torch.arange(COUNT))
    trainer(tmp_path, [callback], accumulate_grad_batches=1).fit(PerExample(), batches)
    assert rule.total_steps == 3
    trainer(tmp_path, [callback], accumulate_grad_batches=2, max_epochs=5).fit(
        PerExample(), batches
    )
    assert rule.total_steps == 3 + 10  # the clipper keeps counting
    own = ByKey(total_steps=7)
    fit(tmp_path, PerExample(), own)
    assert own.total_steps == 7
    endless = ByKey()

    class Ending(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.global_step >= 4

    callback = MicrobatchClip(endless, ids=lambda batch: batch[2])
    trainer(tmp_path, [callback, Ending()], max_epochs=-1).fit(PerExample(), batches)
    assert endless.total_steps is None


def test_a_mean_loss_without_a_micro_batch_size_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"a loss of shape \(\) for 8 of them. Return one loss per"
    ):
        fit(tmp_path, lightning_runs.Model(), LossHistory())


def test_missing_ids_are_an_error_that_shows_how_to_add_them():
    with pytest.raises(ValueError, match=r"MicrobatchClip\(rule, ids=lambda batch: batch\[2\]\)"):
        MicrobatchClip(LossHistory())


def test_positions_as_ids_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="these are positions in the batch"):
        fit(tmp_path, PerExample(), LossHistory(), ids=lambda batch: range(len(batch[0])))


def test_norm_history_takes_single_examples(tmp_path):
    model = PerExample()
    callback, _ = fit(tmp_path, model, NormHistory(total_steps=100), b=1)
    rows = list(range(COUNT))
    each = gradients_of(model, [[row] for row in rows], lambda _, losses: losses)
    found = callback.clipper.policy.rule.table["average"][rows].tolist()
    assert found == pytest.approx([reference.norm(gradient) for gradient in each], rel=1e-4)
    with pytest.raises(ValueError, match="pass microbatch_size=1 instead of None"):
        fit(tmp_path, PerExample(), NormHistory())


def test_loss_weight_needs_no_ids(tmp_path):
    callback, _ = fit(tmp_path, PerExample(), LossWeight(low=0.1, high=0.2), ids=None)
    outcome = callback.clipper.outcome
    losses, weights = outcome.example_losses, outcome.example_weights
    assert outcome.held_back > 0
    assert losses[weights < 0.5].min() > losses[weights > 0.5].max()


def test_domains_are_recorded_and_do_not_change_the_gradient(tmp_path):
    rule, model = ByKey(), PerExample()
    clip = {"domain": lambda batch: [f"kind {row % 2}" for row in batch[2].tolist()]}
    fit(tmp_path, model, rule, clip=clip)
    for found, [rows], seen in zip(model.seen, steps_of(8, 1), rule.seen, strict=True):
        each = gradients_of(model, [[row] for row in rows], lambda _, losses: losses)
        properties.assert_close(found, weighted_mean(each, list(map(weight_of, rows))), 1e-5)
        kinds = dict(zip(seen.keys.tolist(), seen.domains.tolist(), strict=True))
        assert len({kinds[row] for row in rows if row % 2}) == 1
        assert len(set(kinds.values())) == 2


def test_mixed_precision(tmp_path):
    model = PerExample()
    fit(tmp_path, model, ByKey(), precision="bf16-mixed")
    for found, [rows] in zip(model.seen, steps_of(8, 1), strict=True):
        each = gradients_of(model, [[row] for row in rows], lambda _, losses: losses)
        properties.assert_close(found, weighted_mean(each, list(map(weight_of, rows))), 0.05)
