"""Lightning's real Trainer: the callback clips each window as the reference does."""

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from microclip import Clipper
from microclip.integrations.lightning import MicrobatchClip

import properties
import reference
from lightning_runs import COUNT, Model, clipped, data, loader, trainer, windows_of


class Resumable(DataLoader):
    """Resumes where it stopped; Lightning restarts loaders that cannot."""

    seen = start = 0

    def __iter__(self):
        self.seen = self.start
        for batch in list(super().__iter__())[self.start :]:
            self.seen += 1
            yield batch
        self.start = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.start = state["seen"]


def fit(folder, model, **options):
    callback = MicrobatchClip()
    run = trainer(folder, [callback], **options)
    run.fit(model, loader(2))
    return callback, run


def expected(model, window):
    """Return the gradient of a window of four batches of two."""
    return clipped(model, windows_of(2, 4, 2)[window])


@pytest.mark.filterwarnings("ignore")
class TestCallback:
    @pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 0.05)])
    def test_windows_equal_the_reference(self, tmp_path, precision, tolerance):
        """11 batches: two windows of four, and a short one of three."""
        model = Model()
        callback, run = fit(tmp_path, model, precision=precision)
        assert callback.clipper.step == 3
        assert len(model.seen) == 3
        for window, found in enumerate(model.seen):
            properties.assert_close(found, expected(model, window), tolerance)
        assert run.callback_metrics["microclip/bound"] > 0

    def test_gradient_clip_val_acts_on_the_clipped_gradient(self, tmp_path):
        model = Model()
        fit(tmp_path, model, gradient_clip_val=0.01)
        assert len(model.seen) == 3
        for window, found in enumerate(model.seen):
            wanted = expected(model, window)
            scale = 0.01 / (reference.norm(wanted) + 1e-6)
            assert scale < 1
            properties.assert_close(found, [scale * g for g in wanted], 1e-5)

    def test_one_microbatch_is_plain_training(self, tmp_path):
        weights = []
        for callbacks in ([], [MicrobatchClip()]):
            model = Model(lr=0.1)
            run = trainer(tmp_path, callbacks, accumulate_grad_batches=1)
            run.fit(model, loader(8))
            weights.append([p.detach().clone() for p in model.parameters()])
        for one, other in zip(*weights, strict=True):
            assert torch.equal(one, other)

    def test_manual_optimization_is_refused(self, tmp_path):
        model = Model()
        model.automatic_optimization = False
        with pytest.raises(NotImplementedError, match="manual optimization"):
            fit(tmp_path, model, accumulate_grad_batches=1)

    def test_checkpoints_save_the_step(self, tmp_path):
        model = Model(lr=0.1)
        _, run = fit(tmp_path, model)
        run.save_checkpoint(tmp_path / "model.ckpt")
        again = MicrobatchClip()
        run = trainer(tmp_path, [again], max_epochs=2)
        run.fit(
            Model(lr=0.1),
            loader(2),
            ckpt_path=tmp_path / "model.ckpt",
            weights_only=False,
        )
        assert again.clipper.step == 6

    def test_resuming_in_an_epoch_gives_the_same_weights(self, tmp_path):
        weights = []
        for resumed in (False, True):
            batches = Resumable(TensorDataset(*data()), batch_size=2)
            model, callback = Model(lr=0.1), MicrobatchClip()
            keep = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
            run = trainer(tmp_path, [callback, keep], enable_checkpointing=True)
            path = next(iter(tmp_path.glob("*step=2.ckpt"))) if resumed else None
            run.fit(model, batches, ckpt_path=path, weights_only=False)
            assert callback.clipper.step == 3
            assert len(model.seen) == (1 if resumed else 3)
            weights.append([p.detach().clone() for p in model.parameters()])
        for one, other in zip(*weights, strict=True):
            assert torch.equal(one, other)

    def test_losses_are_scaled_and_unscaled(self, tmp_path):
        """Lightning unscales before on_before_optimizer_step, so we must finish before that."""
        model = Model()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        callback, _ = fit(tmp_path, model, plugins=[plugin])
        assert len(model.seen) == 3
        for window, found in enumerate(model.seen):
            properties.assert_close(found, expected(model, window), 0.02)
        assert float(callback.clipper.outcome.norms.max()) < 10  # not a thousand times that
        assert float(callback.clipper.outcome.loss) < 10

    def test_ids_domains_and_losses(self, tmp_path):
        x, y = data()
        callback = MicrobatchClip(
            ids=lambda batch: batch[2], domain=lambda batch: int(batch[2][0]) % 4
        )
        model = Model()
        run = trainer(tmp_path, [callback])
        run.fit(model, loader(2, torch.arange(COUNT)))
        outcome = callback.clipper.outcome
        assert outcome.ids == ((16, 17), (18, 19), (20, 21))
        assert outcome.domains == (0, 2, 0)
        wanted = F.cross_entropy(model.net(x[16:]), y[16:])
        assert outcome.loss.item() == pytest.approx(wanted.item(), rel=1e-5)

    def test_an_exception_leaves_no_half_step(self, tmp_path):
        class Failing(Model):
            def training_step(self, batch, batch_idx):
                if batch_idx == 2:
                    raise RuntimeError("no such example")
                return super().training_step(batch, batch_idx)

        callback = MicrobatchClip()
        run = trainer(tmp_path, [callback])
        with pytest.raises(RuntimeError, match="no such example"):
            run.fit(Failing(), loader(2))
        assert callback.clipper.state_dict()["step"] == 0  # in mid-step this would raise

    def test_other_strategies_are_refused(self, tmp_path):
        model, callback = Model(), MicrobatchClip()
        run = trainer(tmp_path, [callback])
        run._accelerator_connector.strategy = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
        with pytest.raises(NotImplementedError, match="DeepSpeedStrategy .* Use DDP"):
            callback.on_train_start(run, model)


@pytest.mark.filterwarnings("ignore")
class TestClipper:
    def test_manual_optimization(self, tmp_path):
        """b = 2 in batches of 8: the same micro-batches as above."""

        class Manual(Model):
            def __init__(self):
                super().__init__()
                self.automatic_optimization = False
                self.clipper = None

            def training_step(self, batch, batch_idx):
                self.clipper = self.clipper or Clipper(self.net, 2)
                self.clipper.backward(lambda b: F.cross_entropy(self.net(b[0]), b[1]), batch)
                self.seen.append([p.grad.clone() for p in self.parameters()])
                self.zero_grad()

        model = Manual()
        run = trainer(tmp_path, [], accumulate_grad_batches=1)
        run.fit(model, loader(8))
        assert len(model.seen) == 3
        for window, found in enumerate(model.seen):
            properties.assert_close(found, expected(Model(), window), 1e-5)

    def test_fabric(self):
        fabric = Fabric(accelerator="cpu", devices=1)
        plain = Model()
        model, _ = fabric.setup(plain.net, torch.optim.SGD(plain.net.parameters(), lr=0.1))
        x, y = data()
        clipper = Clipper(model, 2)
        clipper.backward(lambda b: F.cross_entropy(model(b[0]), b[1]), (x[:8], y[:8]))
        properties.assert_close([p.grad for p in plain.parameters()], expected(Model(), 0), 1e-5)

    def test_fabric_in_mixed_precision(self):
        """Fabric insists on its own backward, so we call fold() after each."""
        fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        plain = Model()
        model, _ = fabric.setup(plain.net, torch.optim.SGD(plain.net.parameters(), lr=0.1))
        x, y = data()
        clipper = Clipper(model)
        for start in range(0, 8, 2):
            with clipper.local():
                rows = slice(start, start + 2)
                fabric.backward(F.cross_entropy(model(x[rows]), y[rows]))
                clipper.fold(size=2)
        clipper.finish()
        properties.assert_close([p.grad for p in plain.parameters()], expected(Model(), 0), 0.05)
