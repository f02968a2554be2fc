"""How the Lightning callback cuts, counts and names batches, and which ones it skips."""

import warnings

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

from microclip.integrations.lightning import MicrobatchClip

import properties
import reference
from lightning_runs import (
    COUNT,
    LIGHTNING_WARNINGS,
    Model,
    Watched,
    assert_steps,
    clipped,
    data,
    fit,
    loader,
    rows_of,
    trainer,
    windows_of,
)

pytestmark = LIGHTNING_WARNINGS


@pytest.mark.parametrize(
    ("size", "accumulate", "b", "precision"),
    [
        (8, 1, 2, "32-true"), (8, 1, 3, "32-true"), (8, 1, 1, "32-true"), (8, 1, 8, "32-true"),
        (8, 1, 100, "32-true"), (4, 2, 2, "32-true"), (4, 2, 3, "32-true"), (4, 4, 1, "32-true"),
        (22, 1, 4, "32-true"), (8, 1, 2, "bf16-mixed"), (4, 2, 2, "16-mixed"), (8, 1, 2, "64-true"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:A step has only one micro-batch")
def test_cut_batches_equal_the_reference(tmp_path, size, accumulate, b, precision):
    model, options = Model(), {"precision": precision}
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        options = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    callback = fit(
        tmp_path, model, size, accumulate=accumulate, clip={"microbatch_size": b}, **options
    )
    model = model.to(torch.float32)
    wanted = windows_of(size, accumulate, b)
    assert_steps(model, wanted, 0.03 if "mixed" in precision else 1e-5)
    assert callback.clipper.step == len(wanted)
    assert callback.clipper.outcome.sizes.tolist() == [len(piece) for piece in wanted[-1]]


def test_weights_after_training_equal_a_plain_loop(tmp_path):
    """Over two epochs, so that nothing may leak from one window into the next."""
    model = Model(lr=0.1)
    fit(tmp_path, model, 4, accumulate=2, max_epochs=2)
    twin = Model()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for window in windows_of(4, 2, 2) * 2:
        for p, g in zip(twin.parameters(), clipped(twin, window), strict=True):
            p.grad = g.float()
        optimizer.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("size", "b"), [(8, 8), (8, 1000), (8, None), (22, 22), (1, 1)])
@pytest.mark.filterwarnings("ignore:A step has only one micro-batch")
def test_one_microbatch_is_stock_lightning_bit_for_bit(tmp_path, size, b):
    weights = []
    for callbacks in ([], [MicrobatchClip(microbatch_size=b)]):
        model = Model(lr=0.1)
        run = trainer(tmp_path, callbacks, accumulate_grad_batches=1, max_epochs=2)
        run.fit(model, loader(size))
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


class TestWarnings:
    def test_one_microbatch_per_step(self, tmp_path):
        with pytest.warns(UserWarning, match="nothing is clipped. Pass MicrobatchClip.microbatch_"):
            fit(tmp_path, Model(), clip={"microbatch_size": None})

    @pytest.mark.parametrize(
        ("size", "b", "accumulate"), [(8, 2, 1), (2, None, 4), (7, 6, 1), (3, 3, 2)]
    )
    def test_no_warning_for_several_or_for_a_short_last_batch(self, tmp_path, size, b, accumulate):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="A step has only one micro-batch")
            fit(tmp_path, Model(), size, accumulate=accumulate, clip={"microbatch_size": b})


class Skipping(Model):
    """Returns None for every batch or micro-batch that holds one of the rows."""

    def __init__(self, rows, lr=0.0):
        super().__init__(lr)
        self.rows = data()[0][rows]

    def training_step(self, batch, batch_idx):
        if any((x == row).all() for x in batch[0] for row in self.rows):
            return None
        return super().training_step(batch, batch_idx)


class TestSkipped:
    @pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
    def test_the_last_batch_of_a_window(self, tmp_path, precision):
        """Skips the last batch of each window: Lightning steps anyway, or (16-mixed) ought to."""
        options = {}
        if precision == "16-mixed":
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            options = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
        model = Skipping([7, 15])
        callback = fit(tmp_path, model, 2, accumulate=4, clip={"microbatch_size": None}, **options)
        whole = windows_of(2, 4, 2)
        assert_steps(model, [whole[0][:3], whole[1][:3], whole[2]], 1e-5 if not options else 0.03)
        assert callback.clipper.step == 3

    def test_it_trains(self, tmp_path):
        model = Skipping([7, 15], lr=0.1)
        before = [p.detach().clone() for p in model.parameters()]
        fit(tmp_path, model, 2, accumulate=4, clip={"microbatch_size": None}, limit_train_batches=8)
        assert not any(
            torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)
        )

    @pytest.mark.parametrize("rows", [[0], [1], [6], [7], [2, 7], [0, 2, 4], [0, 2, 4, 6]])
    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_some_microbatches_of_a_batch(self, tmp_path, rows, accumulate):
        model = Skipping(rows)
        fit(tmp_path, model, 8, accumulate=accumulate)
        wanted = [
            [piece for piece in window if not set(piece) & set(rows)]
            for window in windows_of(8, accumulate, 2)
        ]
        if not wanted[0]:  # Lightning still calls the optimizer, but without gradients
            assert all(p is None for p in model.seen.pop(0))
            wanted.pop(0)
        assert_steps(model, wanted)

    def test_first_and_middle_batches(self, tmp_path):
        model = Skipping([0, 10, 16, 18, 20])
        fit(tmp_path, model, 2, accumulate=4, clip={"microbatch_size": None})
        whole = windows_of(2, 4, 2)
        assert all(gradient is None for gradient in model.seen[2])
        model.seen.pop()
        assert_steps(model, [whole[0][1:], [whole[1][0], *whole[1][2:]]])

    def test_the_rest_of_an_epoch(self, tmp_path):
        """on_train_batch_start returns -1 in mid-window: the window is dropped."""

        class Stopping(Model):
            def on_train_batch_start(self, batch, batch_idx):
                return -1 if batch_idx == 2 and self.current_epoch == 0 else None

        model = Stopping()
        with pytest.warns(UserWarning, match="8 micro-batches folded in it are dropped"):
            fit(tmp_path, model, 8, accumulate=3, max_epochs=2)
        assert_steps(model, windows_of(8, 3, 2))

    def test_batches_that_are_none(self, tmp_path):
        class Missing(DataLoader):
            def __iter__(self):
                return iter([b if i != 1 else None for i, b in enumerate(super().__iter__())])

        model, batches = Model(), Missing(TensorDataset(*data()), batch_size=8)
        with pytest.warns(UserWarning, match="train_dataloader yielded None"):
            fit(tmp_path, model, batches=batches)
        whole = windows_of(8, 1, 2)
        assert_steps(model, [whole[0], whole[2]])


class Recurrent(pl.LightningModule):
    """Batches of shape (time, examples, features)."""

    def __init__(self, first=False):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(4, 5, batch_first=first), nn.Linear(5, 3)
        self.seen, self.first = [], first

    def loss(self, x, y):
        states = self.rnn(x)[0]
        return F.cross_entropy(self.head(states[:, -1] if self.first else states[-1]), y)

    def training_step(self, batch, batch_idx):
        return self.loss(*batch)

    def configure_optimizers(self):
        return Watched(self, 0.0)


class TestTimeFirst:
    def batches(self, time, examples, labels=True):
        torch.manual_seed(1)
        x = torch.randn(2, time, examples, 4)
        y = torch.randint(0, 3, (2, examples))
        return [(x[i], y[i]) for i in range(2)]

    @pytest.mark.parametrize(("time", "examples"), [(5, 6), (6, 6), (3, 7)])
    def test_batch_dim(self, tmp_path, time, examples):
        model, batches = Recurrent(), self.batches(time, examples)
        callback = fit(tmp_path, model, batches=batches, clip={"batch_dim": 1})
        assert sum(callback.clipper.outcome.sizes) == examples
        for found, (x, y) in zip(model.seen, batches, strict=True):
            rows = rows_of(0, examples, 2)
            gradients = reference.microbatch_gradients(
                lambda batch: model.loss(*batch), list(model.parameters()),
                [(x[:, r], y[r]) for r in rows],
            )  # fmt: skip
            sizes = [len(r) for r in rows]
            wanted = reference.clipped_gradient(gradients, sizes, reference.WEIGH["MinNorm()"])[0]
            properties.assert_close(found, wanted, 1e-5)

    def test_lengths_that_differ_are_an_error(self, tmp_path):
        with pytest.raises(ValueError, match="first dimension, but .* has 5 and .* has 6"):
            fit(tmp_path, Recurrent(), batches=self.batches(5, 6))

    @pytest.mark.parametrize("b", [None, 2])
    def test_a_warning_if_time_was_counted_as_examples(self, tmp_path, b):
        class Tagging(Recurrent):
            def training_step(self, batch, batch_idx):
                return self.head(self.rnn(batch)[0]).square().mean()

        batches = [torch.randn(5, 6, 4) for _ in range(2)]
        with pytest.warns(UserWarning, match="GRU 'rnn' has batch_first=False .* batch_dim=1"):
            fit(tmp_path, Tagging(), batches=batches, clip={"microbatch_size": b}, accumulate=2)

    @pytest.mark.parametrize("given", [0, None])
    def test_no_warning_if_the_model_transposes(self, tmp_path, given):
        class Transposing(Recurrent):
            def training_step(self, batch, batch_idx):
                return self.head(self.rnn(batch.transpose(0, 1))[0]).square().mean()

        batches = [torch.randn(6, 5, 4) for _ in range(2)]
        fit(tmp_path, Transposing(), batches=batches, clip={"batch_dim": given})

    def test_size_counts_what_tensors_do_not_show(self, tmp_path):
        callback = fit(
            tmp_path, Recurrent(), batches=self.batches(5, 6), accumulate=2,
            clip={"microbatch_size": None, "size": lambda batch: len(batch[1])},
        )  # fmt: skip
        assert callback.clipper.outcome.sizes.tolist() == [6, 6]


def _tensor(batch):
    return batch["x"] if isinstance(batch, dict) else batch[0]


class TestNames:
    @pytest.mark.parametrize("kind", [torch.Tensor.tolist, lambda t: t, lambda t: t.numpy()])
    def test_ids_and_domains_are_cut_along(self, tmp_path, kind):
        model = Model()
        callback = fit(
            tmp_path, model, batches=loader(8, torch.arange(COUNT)), limit_train_batches=1,
            clip={"ids": lambda b: b[2].tolist(), "domain": lambda b: kind(b[2] % 2)},
        )  # fmt: skip
        outcome = callback.clipper.outcome
        assert outcome.ids == ((0, 2), (4, 6), (1, 3), (5, 7))
        assert outcome.domains == (0, 0, 1, 1)
        x, y = data()
        gradients = reference.microbatch_gradients(
            lambda batch: F.cross_entropy(model.net(batch[0]), batch[1]),
            list(model.parameters()),
            [(x[list(rows)], y[list(rows)]) for rows in outcome.ids],
        )
        wanted = reference.clipped_gradient(
            gradients, [2] * 4, reference.WEIGH["MinNorm()"], domains=[0, 0, 1, 1]
        )[0]
        properties.assert_close(model.seen[0], wanted, 1e-5)

    @pytest.mark.parametrize("collate", [dict, lambda b: [b["x"], b["y"], [b["text"]]]])
    @pytest.mark.parametrize("domain", [None, lambda b: [0, 1] * (len(_tensor(b)) // 2)])
    def test_strings_are_cut_along(self, tmp_path, collate, domain):
        """Loaders collate strings into lists, and training_step may read them."""
        x, y = data()
        rows = [{"x": x[i], "y": y[i], "text": f"{x[i].sum():.4f}"} for i in range(COUNT)]
        texts = []

        class Reading(Model):
            def training_step(self, batch, batch_idx):
                x, y, [*text] = batch.values() if isinstance(batch, dict) else batch
                text = text if isinstance(text[0], str) else text[0]
                assert text == [f"{row.sum():.4f}" for row in x]
                texts.extend(text)
                return super().training_step((x, y), batch_idx)

        batches = DataLoader(rows, 8, collate_fn=lambda b: collate(default_collate(b)))
        fit(tmp_path, Reading(), batches=batches, clip={"domain": domain})
        assert sorted(texts) == sorted(row["text"] for row in rows)

    @pytest.mark.parametrize("one", [lambda b: b[2][0] * 0, lambda b: np.int64(0), lambda b: 0])
    def test_a_tensor_is_converted_to_its_label(self, tmp_path, one):
        """Tensors hash by identity, so otherwise each batch would be its own domain."""
        model = Model()
        callback = fit(
            tmp_path, model, 2, batches=loader(2, torch.arange(COUNT)), accumulate=4,
            clip={"microbatch_size": None, "domain": one},
        )  # fmt: skip
        assert callback.clipper.outcome.domains == (0, 0, 0)
        assert_steps(model, windows_of(2, 4, 2))

    def test_a_batch_of_two_domains_must_be_cut(self, tmp_path):
        with pytest.raises(ValueError, match="one domain, but domain.. returned 0, 1 for this one"):
            fit(
                tmp_path, Model(), batches=loader(8, torch.arange(COUNT)), accumulate=2,
                clip={"microbatch_size": None, "domain": lambda b: b[2] % 2},
            )  # fmt: skip

    @pytest.mark.parametrize("b", [None, 2])
    def test_too_few_ids_are_an_error(self, tmp_path, b):
        with pytest.raises(ValueError, match="ids"):
            fit(tmp_path, Model(), clip={"microbatch_size": b, "ids": lambda b: [1, 2, 3]})

    def test_positions_continue_over_batches(self, tmp_path):
        callback = fit(tmp_path, Model(), 4, accumulate=2, limit_train_batches=2)
        assert callback.clipper.outcome.ids == ((0, 1), (2, 3), (4, 5), (6, 7))
