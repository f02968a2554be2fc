"""Lightning's Trainer, the real one: the callback clips windows as the twin does."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from microclip.integrations.lightning import MicrobatchClip

import properties
import reference

COUNT = 22


class Watched(torch.optim.SGD):
    """Keeps the gradients that it is given, after all that Lightning does to them."""

    def __init__(self, model, lr):
        super().__init__(model.parameters(), lr=lr)
        self.model = model

    def step(self, closure=None):
        loss = closure()
        self.model.seen.append([p.grad.clone() for p in self.model.parameters()])
        super().step()
        return loss


class Model(pl.LightningModule):
    def __init__(self, lr=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.lr, self.seen = lr, []

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return Watched(self, lr=self.lr)


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(COUNT, 4, generator=generator)
    return x, torch.randint(0, 3, (COUNT,), generator=generator)


def trainer(folder, callbacks, **options):
    options = {"max_epochs": 1, "accumulate_grad_batches": 4, **options}
    return pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=callbacks,
        default_root_dir=folder, **options,
    )  # fmt: skip


def fit(folder, model, **options):
    callback = MicrobatchClip()
    run = trainer(folder, [callback], **options)
    run.fit(model, DataLoader(TensorDataset(*data()), batch_size=2))
    return callback, run


def twin(model, window):
    x, y = data()
    parts = [list(range(i, min(i + 2, COUNT))) for i in range(0, COUNT, 2)]
    chosen = parts[4 * window : 4 * window + 4]
    gradients = reference.microbatch_gradients(
        lambda batch: model.training_step(batch, 0),
        list(model.parameters()),
        [(x[rows], y[rows]) for rows in chosen],
    )
    sizes = [len(rows) for rows in chosen]
    return reference.clipped_gradient(gradients, sizes, reference.WEIGH["MinNorm()"])[0]


@pytest.mark.filterwarnings("ignore")
class TestCallback:
    @pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 0.05)])
    def test_windows_equal_the_twin(self, tmp_path, precision, tolerance):
        """11 batches: two windows of four, and a short one of three."""
        model = Model()
        callback, run = fit(tmp_path, model, precision=precision)
        assert callback.clipper.step == 3
        assert len(model.seen) == 3
        for window, found in enumerate(model.seen):
            properties.assert_close(found, twin(model, window), tolerance)
        assert run.callback_metrics["microclip/bound"] > 0

    def test_gradient_clip_val_acts_on_the_clipped_gradient(self, tmp_path):
        model = Model()
        fit(tmp_path, model, gradient_clip_val=0.01)
        assert len(model.seen) == 3
        for window, found in enumerate(model.seen):
            wanted = twin(model, window)
            scale = 0.01 / (reference.norm(wanted) + 1e-6)
            assert scale < 1
            properties.assert_close(found, [scale * g for g in wanted], 1e-5)

    def test_one_microbatch_is_plain_training(self, tmp_path):
        weights = []
        for callbacks in ([], [MicrobatchClip()]):
            model = Model(lr=0.1)
            run = trainer(tmp_path, callbacks, accumulate_grad_batches=1)
            run.fit(model, DataLoader(TensorDataset(*data()), batch_size=8))
            weights.append([p.detach().clone() for p in model.parameters()])
        for one, other in zip(*weights, strict=True):
            assert torch.equal(one, other)

    def test_manual_optimization_is_refused(self, tmp_path):
        model = Model()
        model.automatic_optimization = False
        with pytest.raises(NotImplementedError, match="manual optimization"):
            fit(tmp_path, model, accumulate_grad_batches=1)

    def test_checkpoints_hold_the_step(self, tmp_path):
        model = Model(lr=0.1)
        _, run = fit(tmp_path, model)
        run.save_checkpoint(tmp_path / "model.ckpt")
        again = MicrobatchClip()
        run = trainer(tmp_path, [again], max_epochs=2)
        run.fit(
            Model(lr=0.1),
            DataLoader(TensorDataset(*data()), batch_size=2),
            ckpt_path=tmp_path / "model.ckpt",
            weights_only=False,
        )
        assert again.clipper.step == 6
