"""Hooks, optimizers and logs around a clipped step in Lightning."""

import csv
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F
from torchmetrics import MeanMetric

from microclip.integrations.lightning import MicrobatchClip

import properties
import reference
from lightning_runs import (
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


class TestHooks:
    @pytest.mark.parametrize(("size", "accumulate", "b"), [(4, 2, 2), (8, 1, 2), (2, 4, None)])
    def test_gradients_edited_after_backward(self, tmp_path, size, accumulate, b):
        """What the hook leaves in .grad is the micro-batch's gradient, and is clipped."""

        class Halved(Model):
            calls = 0

            def on_after_backward(self):
                self.calls += 1
                for p in self.net[2].parameters():
                    p.grad.mul_(0.1)

        model = Halved()
        fit(tmp_path, model, size, accumulate=accumulate, clip={"microbatch_size": b})
        assert model.calls == 11
        x, y = data()
        for found, window in zip(model.seen, windows_of(size, accumulate, 2), strict=True):
            gradients = reference.microbatch_gradients(
                lambda batch: F.cross_entropy(model.net(batch[0]), batch[1]),
                list(model.parameters()),
                [(x[rows], y[rows]) for rows in window],
            )
            edited = [[g if i < 2 else 0.1 * g for i, g in enumerate(gs)] for gs in gradients]
            sizes = [len(rows) for rows in window]
            wanted = reference.clipped_gradient(edited, sizes, reference.WEIGH["MinNorm()"])[0]
            properties.assert_close(found, wanted, 1e-5)

    def test_later_hooks_see_the_clipped_gradient(self, tmp_path):
        class Looking(Model):
            def on_before_optimizer_step(self, optimizer):
                self.found = [p.grad.clone() for p in self.parameters()]

            def configure_gradient_clipping(self, optimizer, *args, **kwargs):
                for p in self.parameters():
                    p.grad.mul_(0.5)

        model = Looking()
        fit(tmp_path, model, limit_train_batches=1)
        wanted = clipped(model, windows_of(8, 1, 2)[0])
        properties.assert_close(model.found, wanted, 1e-5)
        properties.assert_close(model.seen[0], [0.5 * g for g in wanted], 1e-5)

    @pytest.mark.parametrize("algorithm", ["norm", "value"])
    def test_gradient_clip_val(self, tmp_path, algorithm):
        model = Model()
        fit(tmp_path, model, gradient_clip_val=0.01, gradient_clip_algorithm=algorithm)
        for found, window in zip(model.seen, windows_of(8, 1, 2), strict=True):
            wanted = clipped(model, window)
            scale = 0.01 / (reference.norm(wanted) + 1e-6)
            norm = [scale * g for g in wanted]
            value = [g.clamp(-0.01, 0.01) for g in wanted]
            properties.assert_close(found, norm if algorithm == "norm" else value, 1e-5)

    def test_a_custom_backward(self, tmp_path):
        class Custom(Model):
            calls = 0

            def backward(self, loss, *args, **kwargs):
                self.calls += 1
                loss.backward(*args, **kwargs)

        model = Custom()
        fit(tmp_path, model)
        assert model.calls == 11
        assert_steps(model, windows_of(8, 1, 2))

    def test_hooks_see_the_loss_of_a_microbatch(self, tmp_path):
        found = []

        class Look(pl.Callback):
            def on_before_backward(self, trainer, module, loss):
                found.append(loss.item())

        model = Model()
        fit(tmp_path, model, 4, callbacks=[Look()], accumulate=2, limit_train_batches=2)
        x, y = data()
        wanted = [
            F.cross_entropy(model.net(x[i : i + 2]), y[i : i + 2]).item() for i in range(0, 8, 2)
        ]
        assert found == pytest.approx(wanted, rel=1e-5)

    def test_old_gradients_are_seen_by_on_before_zero_grad(self, tmp_path):
        """As in stock Lightning, which clears them after the forward pass."""

        class Looking(Model):
            kept = ()

            def on_before_zero_grad(self, optimizer):
                self.kept += (self.net[0].weight.grad,)

        model = Looking()
        fit(tmp_path, model, limit_train_batches=2)
        assert model.kept[0] is None
        assert torch.equal(model.kept[1], model.seen[0][0])


class TestOptimizers:
    def lbfgs(self, net, batches, b):
        """Train with plain torch LBFGS on the reference's clipped gradients."""
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.3, max_iter=4)
        for x, y in batches:
            pieces = [(x[i : i + b], y[i : i + b]) for i in range(0, len(x), b)]

            def closure(pieces=pieces):
                def loss_fn(batch):
                    return F.cross_entropy(net(batch[0]), batch[1])

                parameters = list(net.parameters())
                gradients = reference.microbatch_gradients(loss_fn, parameters, pieces)
                sizes = [len(piece[0]) for piece in pieces]
                found = reference.clipped_gradient(gradients, sizes, reference.WEIGH["MinNorm()"])
                for p, g in zip(parameters, found[0], strict=True):
                    p.grad = g.float()
                losses = [loss_fn(piece).detach() * len(piece[0]) for piece in pieces]
                return sum(losses) / sum(sizes)

            optimizer.step(closure)

    def test_lbfgs_evaluates_several_times(self, tmp_path):
        class Newton(Model):
            def configure_optimizers(self):
                return torch.optim.LBFGS(self.parameters(), lr=0.3, max_iter=4)

        model, twin = Newton(), Model()
        fit(tmp_path, model)
        self.lbfgs(twin.net, loader(8), 2)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("b", [None, 2])
    def test_lbfgs_over_several_batches_is_refused(self, tmp_path, b):
        class Newton(Model):
            def configure_optimizers(self):
                return torch.optim.LBFGS(self.parameters(), max_iter=4)

        with pytest.raises(NotImplementedError, match="LBFGS evaluates .* a second time"):
            fit(tmp_path, Newton(), accumulate=2, clip={"microbatch_size": b})

    def test_several_optimizers_are_refused_by_lightning(self, tmp_path):
        class Two(Model):
            def configure_optimizers(self):
                return [Watched(self, 0.1), Watched(self, 0.1)]

        with pytest.raises(RuntimeError, match="manual optimization"):
            fit(tmp_path, Two())

    def test_a_tensor_that_is_not_a_parameter(self, tmp_path):
        class Outside(Model):
            def configure_optimizers(self):
                self.extra = [torch.zeros(3, requires_grad=True)]
                return torch.optim.SGD([*self.parameters(), *self.extra], lr=0.1)

        with pytest.raises(ValueError, match=r"shape \(3,\) that is not a parameter of Outside"):
            fit(tmp_path, Outside())

    @pytest.mark.parametrize(("size", "accumulate", "b"), [(8, 1, 2), (2, 4, None)])
    def test_parameters_that_no_optimizer_clears(self, tmp_path, size, accumulate, b):
        """Their old gradients stay in .grad, as in stock Lightning, but do not enter the norms."""

        class Partly(Model):
            def configure_optimizers(self):
                model = self

                class Head(torch.optim.SGD):
                    def step(self, closure=None):
                        closure()
                        model.seen.append([p.grad.clone() for p in model.parameters()])

                return Head(self.net[2].parameters(), lr=0.0)

        model = Partly()
        fit(tmp_path, model, size, accumulate=accumulate, clip={"microbatch_size": b})
        total = [torch.zeros_like(p, dtype=torch.float64) for p in model.net[0].parameters()]
        for found, window in zip(model.seen, windows_of(8, 1, 2), strict=True):
            wanted = clipped(model, window)
            total = [t + g for t, g in zip(total, wanted[:2], strict=True)]
            properties.assert_close(found, [*total, *wanted[2:]], 1e-5)

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_zeroing_in_place(self, tmp_path, accumulate):
        class Zeroing(Model):
            def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
                optimizer.zero_grad(set_to_none=False)

        model = Zeroing()
        fit(tmp_path, model, 4, accumulate=accumulate)
        assert_steps(model, windows_of(4, accumulate, 2))

    @pytest.mark.filterwarnings("ignore:.*configure_optimizers` returned `None`")
    def test_no_optimizer(self, tmp_path):
        class Without(Model):
            def configure_optimizers(self):
                return None

        model = Without()
        callback = fit(tmp_path, model, limit_train_batches=1)
        assert callback.clipper.step == 1
        found = [p.grad for p in model.parameters()]
        properties.assert_close(found, clipped(model, rows_of(0, 8, 2)), 1e-5)

    def test_a_step_that_the_module_skips(self, tmp_path):
        """Its optimizer_step only runs the closure; the next window starts clean."""

        class Every(Model):
            def optimizer_step(self, epoch, batch_idx, optimizer, closure=None):
                if batch_idx == 1:
                    closure()
                else:
                    optimizer.step(closure=closure)

        model = Every()
        fit(tmp_path, model)
        whole = windows_of(8, 1, 2)
        assert_steps(model, [whole[0], whole[2]])


class TestLogs:
    @pytest.mark.parametrize("b", [2, 3, 100])
    def test_logged_values_are_those_of_the_whole_batch(self, tmp_path, b):
        class Logging(Model):
            def training_step(self, batch, batch_idx):
                loss = super().training_step(batch, batch_idx)
                correct = (self.net(batch[0]).argmax(1) == batch[1]).float()
                self.log("loss", loss, on_step=True, on_epoch=True)
                self.log("step", loss, on_step=True)
                self.log("positional", loss, False, None, True)
                self.log_dict({"mean": correct.mean(), "examples": float(len(correct))})
                self.log("given", correct.mean(), on_epoch=True, batch_size=len(correct))
                self.log("count", correct.sum(), reduce_fx="sum", on_step=False, on_epoch=True)
                self.log("most", correct.max(), reduce_fx=max, on_step=False, on_epoch=True)
                self.log("epoch", correct.mean(), on_step=False, on_epoch=True)
                return loss

        found, steps = [], []
        for callbacks in ([], [MicrobatchClip(microbatch_size=b)]):
            logger = CSVLogger(tmp_path / f"{len(found)}")
            run = pl.Trainer(
                accelerator="cpu", max_epochs=1, logger=logger, log_every_n_steps=1,
                enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
                enable_checkpointing=False,
            )  # fmt: skip
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run.fit(Logging(), loader(8))
            with open(f"{logger.log_dir}/metrics.csv") as file:
                steps.append(
                    [float(row["loss_step"]) for row in csv.DictReader(file) if row["loss_step"]]
                )
            figures = {name: value.item() for name, value in run.callback_metrics.items()}
            found.append({k: v for k, v in figures.items() if not k.startswith("microclip")})
        stock, ours = found
        if b < 8:  # the number of examples per call does differ
            assert (stock.pop("examples"), ours.pop("examples")) == (6, b)
        assert ours == pytest.approx(stock, rel=1e-5)
        assert set(ours) >= {"loss_step", "loss_epoch", "step", "mean", "given", "count", "most"}
        assert len(steps[0]) == 3
        assert steps[1] == pytest.approx(steps[0], rel=1e-5)

    def test_a_torchmetrics_metric(self, tmp_path):
        class Counting(Model):
            def __init__(self):
                super().__init__()
                self.accuracy = MeanMetric()

            def training_step(self, batch, batch_idx):
                correct = self.net(batch[0]).argmax(1) == batch[1]
                self.accuracy(correct.float())
                self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
                return super().training_step(batch, batch_idx)

        found = []
        for callbacks in ([], [MicrobatchClip(microbatch_size=3)]):
            run = trainer(tmp_path, callbacks, accumulate_grad_batches=1)
            run.fit(Counting(), loader(8))
            found.append(run.callback_metrics["accuracy"].item())
        assert found[1] == pytest.approx(found[0])

    def test_metrics_of_the_step(self, tmp_path):
        model = Model()
        callback = MicrobatchClip(microbatch_size=2)
        run = trainer(tmp_path, [callback], accumulate_grad_batches=1)
        run.fit(model, loader(8))
        bound = callback.clipper.outcome.bound.item()
        assert run.callback_metrics["microclip/bound"].item() == pytest.approx(bound)

    @pytest.mark.parametrize("given", [False, True])
    def test_outputs_are_of_the_whole_batch(self, tmp_path, given):
        found = []

        class Look(pl.Callback):
            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                found.append((outputs, len(batch[0])))

        class Telling(Model):
            def training_step(self, batch, batch_idx):
                logits = self.net(batch[0])
                loss = F.cross_entropy(logits, batch[1])
                more = {"mean": logits.mean(), "number": batch_idx, "names": ["x"] * len(logits)}
                return {
                    "loss": loss,
                    "logits": logits,
                    "more": more,
                    "float": logits.sum(1).mean().item(),
                }

        for b in (2, 100):
            clip = {"microbatch_size": b}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="A step has")
                fit(tmp_path, Telling(), callbacks=[Look()], clip=clip, accumulate=1 + given)
        ours, whole = found[:3], found[3:]
        for (one, size), (other, _) in zip(ours, whole, strict=True):
            assert one["logits"].shape == (size, 3)
            torch.testing.assert_close(one["logits"], other["logits"])
            assert not one["logits"].requires_grad
            assert one["loss"].item() == pytest.approx(other["loss"].item(), rel=1e-5)
            assert one["float"] == pytest.approx(other["float"], rel=1e-4)
            assert one["more"]["mean"].item() == pytest.approx(
                other["more"]["mean"].item(), rel=1e-4
            )
            assert one["more"]["number"] == other["more"]["number"]
            assert one["more"]["names"] == ["x"] * size

    @pytest.mark.parametrize(
        "odd",
        [lambda x: torch.tensor(int(x.sum() * 1000)), lambda x: str(x.sum()), lambda x: x.sum(0)],
    )
    def test_outputs_that_cannot_be_merged_are_refused(self, tmp_path, odd):
        class Odd(Model):
            def training_step(self, batch, batch_idx):
                return {"loss": super().training_step(batch, batch_idx), "odd": odd(batch[0])}

        with pytest.raises(
            NotImplementedError, match="training_step returned 'odd' along with the loss"
        ):
            fit(tmp_path, Odd())

    def test_a_dict_without_loss_is_lightnings_error(self, tmp_path):
        class Odd(Model):
            def training_step(self, batch, batch_idx):
                return {"los": super().training_step(batch, batch_idx)}

        with pytest.raises(Exception, match="'loss' key needs to be present"):
            fit(tmp_path, Odd())
