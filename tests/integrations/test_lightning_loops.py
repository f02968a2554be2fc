"""Lightning's loops with clipped steps: limits, errors, resuming, tuner."""

import re
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from microclip import Ledger, rules
from microclip.integrations.lightning import MicrobatchClip
from microclip.ledger.read import open_ledger

import properties
from lightning_runs import (
    LIGHTNING_WARNINGS,
    Model,
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


class TestLoops:
    @pytest.mark.parametrize(
        ("options", "wanted"),
        [
            ({"limit_train_batches": 3, "accumulate": 2}, [[0, 8], [8, 12]]),
            ({"overfit_batches": 2}, [[0, 4], [4, 8]]),
            ({"overfit_batches": 3, "accumulate": 2}, [[0, 8], [8, 12]]),
            ({"max_steps": 1, "accumulate": 3, "max_epochs": -1}, [[0, 12]]),
            ({"max_steps": 3, "accumulate": 4, "max_epochs": -1}, [[0, 16], [16, 22], [0, 16]]),
            ({"fast_dev_run": 3, "accumulate": 2}, [[0, 8], [8, 12]]),
            ({"limit_train_batches": 0.5, "accumulate": 2}, [[0, 8], [8, 12]]),
        ],
    )
    def test_limits(self, tmp_path, options, wanted):
        model = Model()
        fit(tmp_path, model, 4, **options)
        assert_steps(model, [rows_of(start, stop, 2) for start, stop in wanted])

    @pytest.mark.parametrize("accumulate", [1, 3])
    def test_loaders_without_length(self, tmp_path, accumulate):
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(zip(*data(), strict=True))

        model = Model()
        fit(tmp_path, model, batches=DataLoader(Stream(), batch_size=4), accumulate=accumulate)
        assert_steps(model, windows_of(4, accumulate, 2))

    def test_validation_in_mid_window(self, tmp_path):
        class Validated(Model):
            def validation_step(self, batch, batch_idx):
                self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

        model = Validated()
        callback = MicrobatchClip(microbatch_size=2)
        run = trainer(tmp_path, [callback], accumulate_grad_batches=3, val_check_interval=1)
        run.fit(model, loader(4), loader(4))
        assert_steps(model, windows_of(4, 3, 2))

    def test_a_window_that_changes(self, tmp_path):
        model = Model()
        fit(
            tmp_path,
            model,
            4,
            callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})],
            max_epochs=2,
        )
        assert_steps(model, windows_of(4, 1, 2) + windows_of(4, 3, 2))

    def test_stopping_in_mid_window(self, tmp_path):
        class Stop(pl.Callback):
            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                trainer.should_stop = batch_idx == 3

        model, callback = Model(), MicrobatchClip(microbatch_size=2)
        run = trainer(tmp_path, [callback, Stop()], accumulate_grad_batches=3)
        run.fit(model, loader(4))
        assert_steps(model, windows_of(4, 3, 2)[:1])
        model.seen.clear()
        run = trainer(tmp_path, [callback], accumulate_grad_batches=3)
        run.fit(model, loader(4))
        assert_steps(model, windows_of(4, 3, 2))

    def test_fitting_again_continues_the_step_count(self, tmp_path):
        callback, model = MicrobatchClip(microbatch_size=2), Model()
        for _ in range(2):
            trainer(tmp_path, [callback], accumulate_grad_batches=1).fit(model, loader(8))
        assert callback.clipper.step == 6
        assert_steps(model, windows_of(8, 1, 2) * 2)

    def test_fitting_again_after_an_error(self, tmp_path):
        class Failing(Model):
            fails = True

            def training_step(self, batch, batch_idx):
                if batch_idx == 1 and self.fails:
                    raise RuntimeError("no such example")
                return super().training_step(batch, batch_idx)

        callback, model = MicrobatchClip(microbatch_size=2), Failing()
        run = trainer(tmp_path, [callback], accumulate_grad_batches=2)
        with pytest.raises(RuntimeError, match="no such example"):
            run.fit(model, loader(4))
        assert "training_step" not in vars(run.strategy)
        assert "backward" not in vars(run.strategy)
        assert "log" not in vars(model)
        model.fails = False
        trainer(tmp_path, [callback], accumulate_grad_batches=2).fit(model, loader(4))
        assert_steps(model, windows_of(4, 2, 2))

    def test_resuming_in_mid_window(self, tmp_path):
        class Save(pl.Callback):
            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                if batch_idx == 2:
                    trainer.save_checkpoint(tmp_path / "half.ckpt")

        model = Model()
        fit(tmp_path, model, 4, callbacks=[Save()], accumulate=2)
        again, callback = Model(), MicrobatchClip(microbatch_size=2)
        run = trainer(tmp_path, [callback], accumulate_grad_batches=2)
        with (
            pytest.warns(UserWarning, match="your dataloader is not resumable"),
            pytest.warns(UserWarning, match="in the middle of an acc.* 2 micro-batches"),
        ):
            run.fit(again, loader(4), ckpt_path=tmp_path / "half.ckpt", weights_only=False)
        # the loader cannot resume, so Lightning takes its first batch as the fourth
        assert callback.clipper.step == 1 + len(again.seen)
        properties.assert_close(again.seen[0], clipped(again, rows_of(0, 4, 2)), 1e-5)

    def test_two_callbacks_are_refused(self, tmp_path):
        class Another(MicrobatchClip):
            """A subclass: Lightning itself refuses two callbacks of one class."""

        with pytest.raises(ValueError, match="has 2 MicrobatchClip callbacks"):
            fit(tmp_path, Model(), callbacks=[Another()])

    @pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
    def test_a_training_step_with_dataloader_iter_is_refused(self, tmp_path):
        class Fetching(Model):
            def training_step(self, dataloader_iter):
                return super().training_step(next(dataloader_iter)[0], 0)

        with pytest.raises(NotImplementedError, match="fetches its own batches"):
            fit(tmp_path, Fetching())

    def test_weight_averaging_runs_an_epoch_without_gradients(self, tmp_path):
        class Normed(Model):
            def __init__(self):
                super().__init__(lr=0.1)
                self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

        average = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
        model = Normed()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            callback = fit(tmp_path, model, callbacks=[average], max_epochs=3)
        assert callback.clipper.step == 9
        assert model.net[1].num_batches_tracked > 0

    @pytest.mark.parametrize("how", ["tuner", "callback"])
    def test_lr_find(self, tmp_path, how):
        """It runs without callbacks and does not affect the fit after it."""
        callback, model = MicrobatchClip(microbatch_size=2), Model(lr=0.1)
        finder = [LearningRateFinder(num_training_steps=5, update_attr=False)]
        callbacks = [callback, *(finder if how == "callback" else [])]
        run = trainer(tmp_path, callbacks, accumulate_grad_batches=1, enable_checkpointing=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if how == "tuner":
                Tuner(run).lr_find(model, loader(8), num_training=5, update_attr=False)
            model.seen.clear()
            model.lr = 0.0
            run.fit(model, loader(8))
        if how == "callback":
            del model.seen[:-3]
        assert callback.clipper.step == 3
        assert len(model.seen) == 3

    def test_scale_batch_size(self, tmp_path):
        class Sized(Model):
            batch_size = 2

            def train_dataloader(self):
                return loader(self.batch_size)

        callback, model = MicrobatchClip(microbatch_size=2), Sized()
        run = trainer(tmp_path, [callback], accumulate_grad_batches=1, enable_checkpointing=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Tuner(run).scale_batch_size(model, init_val=2, max_trials=2, steps_per_trial=1)
            model.seen.clear()
            run.fit(model)
        assert_steps(model, windows_of(model.batch_size, 1, 2))

    def test_batchnorm_sees_microbatches(self, tmp_path):
        class Normed(Model):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

        model = Normed()
        fit(tmp_path, model, limit_train_batches=2)
        assert model.net[1].num_batches_tracked == 8

    def test_parameters_unfrozen_between_epochs(self, tmp_path):
        class Unfreeze(pl.Callback):
            def on_train_epoch_start(self, trainer, module):
                module.net[0].requires_grad_(trainer.current_epoch > 0)

        model = Model()
        fit(tmp_path, model, 22, callbacks=[Unfreeze()], max_epochs=2)
        assert [g is None for g in model.seen[0]] == [True, True, False, False]
        properties.assert_close(model.seen[1], clipped(model, rows_of(0, 22, 2)), 1e-5)

    def test_two_loaders_need_size(self, tmp_path):
        class Both(Model):
            def training_step(self, batch, batch_idx):
                return super().training_step(batch["a"], 0) + super().training_step(batch["b"], 0)

        loaders = CombinedLoader({"a": loader(2), "b": loader(4)}, "min_size")
        with pytest.raises(ValueError, match="first dimension") as caught:
            fit(tmp_path, Both(), batches=loaders, clip={"microbatch_size": None}, accumulate=2)
        assert "MicrobatchClip(size=...)" in caught.value.__notes__[0]
        clip = {"microbatch_size": None, "size": lambda batch: len(batch["a"][0])}
        callback = fit(tmp_path, Both(), batches=loaders, clip=clip, accumulate=2)
        assert callback.clipper.outcome.sizes.tolist() == [2, 2]

    def test_a_ledger_over_two_fits(self, tmp_path):
        ledger = Ledger(tmp_path / "ledger")
        callback, model = MicrobatchClip(microbatch_size=2, ledger=ledger), Model()
        for _ in range(2):
            trainer(tmp_path, [callback], accumulate_grad_batches=1).fit(model, loader(8))
        record = open_ledger(tmp_path / "ledger")
        steps = [s for part in record.microbatches(["step"]) for s in part["step"].to_pylist()]
        assert sorted(set(steps)) == list(range(6))


class TestArguments:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"microbatch_size": 0}, "must be a positive integer or None, but got 0"),
            ({"microbatch_size": 2.5}, "must be a positive integer or None, but got 2.5"),
            ({"batch_dim": -1}, "batch_dim must be 0, 1, ... or None, but got -1"),
            ({"size": len, "microbatch_size": 2}, "cannot be combined with microbatch_size"),
            ({"rule": 4}, "Did you mean MicrobatchClip.microbatch_size=4"),
            ({"rule": rules.Median()}, "Median"),
        ],
    )
    def test_wrong_arguments_are_refused_at_once(self, wrong, message):
        with pytest.raises((ValueError, TypeError), match=re.compile(message)):
            MicrobatchClip(**wrong)
