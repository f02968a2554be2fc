"""Training loops with Accelerate: clipped as the reference does it, or refused."""

import contextlib

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from microclip.integrations.accelerate import AcceleratedClipper

import properties
import reference
from accelerate_runs import COUNT, expected, fresh_state, gradients_of, losses, rows_of, start


@pytest.fixture(autouse=True)
def fresh():
    fresh_state()


class TestByHand:
    """Without `accumulate`, the clipper cannot know which batches belong to one step."""

    @pytest.mark.parametrize("steps", [1, 4])
    @pytest.mark.parametrize("block", ["nothing", "no_sync"])
    @pytest.mark.parametrize("clip", [False, True])
    def test_stepping_every_fourth_batch_is_refused(self, steps, block, clip):
        accelerator, model, optimizer, loader, clipper, _ = start(steps, 4)

        def loop():
            for index, batch in enumerate(loader, start=1):
                last = index % 4 == 0
                inside = accelerator.no_sync(model) if block == "no_sync" and not last else None
                with inside or contextlib.nullcontext():
                    clipper.backward(losses(model), batch)
                if clip:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                if last:
                    optimizer.step()
                    optimizer.zero_grad()

        with pytest.raises(RuntimeError, match="accelerator.accumulate.model.:` around each batch"):
            loop()

    @pytest.mark.parametrize("trained", [0, 1])
    def test_gradients_outside_the_optimizer_may_stay(self, trained):
        """zero_grad() does not clear them; those it does clear are still checked."""
        accelerator = Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model[trained].parameters(), lr=0.0)
        model, optimizer = accelerator.prepare(model, optimizer)
        clipper = AcceleratedClipper(accelerator, model, 2)
        batch = torch.randn(8, 4), torch.randint(0, 3, (8,))
        found = []
        for _ in range(3):
            clipper.backward(lambda b: F.cross_entropy(model(b[0]), b[1]), batch)
            found.append(model[trained].weight.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        clipper.backward(lambda b: F.cross_entropy(model(b[0]), b[1]), batch)
        with pytest.raises(RuntimeError, match="still in .grad"):
            clipper.backward(lambda b: F.cross_entropy(model(b[0]), b[1]), batch)

    def test_the_refusal_changes_nothing_and_repeats(self):
        _, model, optimizer, loader, clipper, data = start(1, 8)
        batches = list(loader)
        clipper.backward(losses(model), batches[0])
        before = gradients_of(model)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="still in .grad"):
                clipper.backward(losses(model), batches[1])
        assert all(torch.equal(a, b) for a, b in zip(before, gradients_of(model), strict=True))
        optimizer.zero_grad()
        clipper.backward(losses(model), batches[1])
        found = gradients_of(model)
        properties.assert_close(found, expected(model, data, rows_of(8)[1:2], 2), 1e-5)

    def test_never_zeroing_is_refused(self):
        _, model, optimizer, loader, clipper, _ = start(1, 8)
        first, second, _ = loader
        clipper.backward(losses(model), first)
        optimizer.step()
        with pytest.raises(RuntimeError, match="Call optimizer.zero_grad.. after optimizer.step"):
            clipper.backward(losses(model), second)

    def test_two_losses_are_refused(self):
        _, model, _, loader, clipper, _ = start(1, 8)
        batch = next(iter(loader))
        clipper.backward(losses(model), batch)
        with pytest.raises(RuntimeError, match="add them up in one loss_fn"):
            clipper.backward(lambda batch: model(batch[0]).square().mean(), batch)

    @pytest.mark.parametrize("sync", [1, 2])
    def test_two_losses_in_a_window_are_refused(self, sync):
        accelerator, model, _, loader, clipper, _ = start(2, 4)
        for _, batch in zip(range(sync), loader, strict=False):
            with accelerator.accumulate(model):
                clipper.backward(losses(model), batch)
        with pytest.raises(RuntimeError, match="twice inside one"):
            clipper.backward(losses(model), batch)

    def test_accumulate_never_entered_is_refused_at_once(self):
        _, model, _, loader, clipper, _ = start(4, 4)
        with pytest.raises(RuntimeError, match="steps is 4, but .* outside accelerator.accumulate"):
            clipper.backward(losses(model), next(iter(loader)))
        assert all(p.grad is None for p in model.parameters())

    def test_leaving_accumulate_later_is_refused(self):
        accelerator, model, optimizer, loader, clipper, _ = start(2, 2)
        batches = iter(loader)
        for _ in range(2):
            with accelerator.accumulate(model):
                clipper.backward(losses(model), next(batches))
                optimizer.step()
                optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="outside accelerator.accumulate"):
            clipper.backward(losses(model), next(batches))


ZEROING = {
    "after": lambda optimizer, model: optimizer.zero_grad(),
    "in place": lambda optimizer, model: optimizer.zero_grad(set_to_none=False),
    "model": lambda optimizer, model: model.zero_grad(),
    "model, in place": lambda optimizer, model: model.zero_grad(set_to_none=False),
    "raw": lambda optimizer, model: optimizer.optimizer.zero_grad(),
    "by hand": lambda optimizer, model: [setattr(p, "grad", None) for p in model.parameters()],
}


class TestGoodLoops:
    @pytest.mark.parametrize("clip", [False, True])
    @pytest.mark.parametrize("steps", [1, 2])
    @pytest.mark.parametrize("how", ZEROING)
    def test_every_way_of_zeroing(self, how, steps, clip):
        accelerator, model, optimizer, loader, clipper, data = start(steps, 4)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        parts, found = rows_of(4), []
        for batch in loader:
            with accelerator.accumulate(model):
                clipper.backward(losses(model), batch)
                if accelerator.sync_gradients:
                    found.append(gradients_of(model))
                    if clip:
                        accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                ZEROING[how](optimizer, model)
        windows = [parts[i : i + steps] for i in range(0, len(parts), steps)]
        assert len(found) == len(windows)
        for each, window in zip(found, windows, strict=True):
            properties.assert_close(each, expected(model, data, window, 2), 1e-5)

    def test_zeroing_first(self):
        _, model, optimizer, loader, clipper, data = start(1, 8)
        for batch, part in zip(loader, rows_of(8), strict=True):
            optimizer.zero_grad()
            clipper.backward(losses(model), batch)
            found = gradients_of(model)
            optimizer.zero_grad()
            wanted = expected(model, data, [part], 2)
            properties.assert_close(found, wanted, 1e-5)

    def test_an_optimizer_that_was_not_prepared(self):
        """Its step in mid-window does nothing, since .grad is set with the last batch only."""
        accelerator, model, _, loader, clipper, data = start(2, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        found = []
        for batch in loader:
            with accelerator.accumulate(model):
                if clipper.backward(losses(model), batch):
                    found.append(gradients_of(model))
                optimizer.step()
                optimizer.zero_grad()
        parts = rows_of(4)
        assert len(found) == 3
        properties.assert_close(found[1], expected(model, data, parts[2:4], 2), 1e-5)

    @pytest.mark.parametrize("prepared", [True, False])
    def test_skipped_batches_and_several_epochs(self, prepared):
        accelerator, model, optimizer, loader, clipper, data = start(2, 8)
        if not prepared:
            loader = DataLoader(TensorDataset(*data), batch_size=8)
        for _ in range(4):
            for index, batch in enumerate(loader):
                with accelerator.accumulate(model):
                    if index == 0:  # the same position in every epoch
                        clipper.backward(losses(model), batch)
                    optimizer.step()
                    optimizer.zero_grad()

    def test_one_batch_per_epoch(self):
        accelerator, model, optimizer, loader, clipper, _ = start(4, COUNT)
        for _ in range(3):
            for batch in loader:
                with accelerator.accumulate(model):
                    assert clipper.backward(losses(model), batch) is not None
                    optimizer.step()
                    optimizer.zero_grad()
        assert clipper.clipper.step == 3

    def test_synchronizing_by_hand(self):
        """Accelerate lets a loop set itself when a window ends."""
        accelerator, model, optimizer, loader, clipper, data = start(1, 4)
        parts, found = rows_of(4), []
        for index, batch in enumerate(loader):
            accelerator.sync_gradients = index % 3 == 2
            if clipper.backward(losses(model), batch):
                found.append(gradients_of(model))
            optimizer.zero_grad()
        accelerator.sync_gradients = True
        assert len(found) == 2
        for each, window in zip(found, (parts[:3], parts[3:]), strict=True):
            properties.assert_close(each, expected(model, data, window, 2), 1e-5)


class TestPlugins:
    @pytest.mark.parametrize(
        "options", [{"sync_with_dataloader": False}, {"sync_each_batch": True}, {}], ids=str
    )
    @pytest.mark.parametrize("steps", [2, 4])
    def test_windows_are_what_accelerate_says(self, options, steps):
        plugin = GradientAccumulationPlugin(num_steps=steps, **options)
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        data = torch.randn(COUNT, 4), torch.randint(0, 3, (COUNT,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(TensorDataset(*data), batch_size=4)
        )
        clipper = AcceleratedClipper(accelerator, model, 2)
        window, steps_made = [], 0
        for _ in range(2):
            for batch, part in zip(loader, rows_of(4), strict=True):
                with accelerator.accumulate(model):
                    window.append(part)
                    outcome = clipper.backward(losses(model), batch)
                    assert (outcome is not None) == accelerator.sync_gradients
                    if outcome is not None:
                        found = gradients_of(model)
                        optimizer.zero_grad()
                        wanted = expected(model, data, window, 2)
                        properties.assert_close(found, wanted, 1e-5)
                        window, steps_made = [], steps_made + 1
                    optimizer.step()
                    optimizer.zero_grad()
        carried = options.get("sync_with_dataloader") is False
        assert steps_made == (12 // steps if carried else 2 * -(-6 // steps))


class TestTwoModels:
    @pytest.mark.parametrize("steps", [1, 2])
    def test_a_generator_and_a_discriminator(self, steps):
        """Two models, two clippers, one accelerator: each clipper has its own window."""
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
        maker, critic = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in (maker, critic)]
        data = torch.randn(16, 4), torch.randn(16, 3)
        maker, critic, *optimizers, loader = accelerator.prepare(
            maker, critic, *optimizers, DataLoader(TensorDataset(*data), batch_size=4)
        )
        clippers = [AcceleratedClipper(accelerator, m, 2) for m in (maker, critic)]

        def judge(batch):
            fake = maker(batch[1]).detach()
            return F.softplus(critic(fake)).mean() + F.softplus(-critic(batch[0])).mean()

        def fool(batch):
            return F.softplus(-critic(maker(batch[1]))).mean()

        made = []
        for batch in loader:
            with accelerator.accumulate(maker, critic):
                found = []
                for clipper, optimizer, loss_fn in zip(
                    reversed(clippers), reversed(optimizers), (judge, fool), strict=True
                ):
                    critic.requires_grad_(loss_fn is judge)
                    if clipper.backward(loss_fn, batch):
                        found.append(gradients_of(clipper.clipper.model))
                    optimizer.step()
                    optimizer.zero_grad()
                if found:
                    made.append(found)
        critic.requires_grad_(True)
        assert len(made) == 4 // steps
        for number, found in enumerate(made):
            first = number * 4 * steps
            pieces = [tuple(t[i : i + 2] for t in data) for i in range(first, first + 4 * steps, 2)]
            for each, model, loss_fn in zip(found, (critic, maker), (judge, fool), strict=True):
                slow = reference.microbatch_gradients(loss_fn, list(model.parameters()), pieces)
                weigh = reference.WEIGH["MinNorm()"]
                wanted = reference.clipped_gradient(slow, [2] * len(pieces), weigh)[0]
                properties.assert_close(each, wanted, 1e-5)


class TestState:
    def test_loading_in_mid_window_drops_what_was_folded(self, tmp_path):
        accelerator, model, optimizer, loader, clipper, data = start(2, 4)
        accelerator.save_state(tmp_path)
        with accelerator.accumulate(model):
            clipper.backward(losses(model), next(iter(loader)))
        accelerator.load_state(tmp_path)
        found = []
        for batch in loader:
            with accelerator.accumulate(model):
                if clipper.backward(losses(model), batch):
                    found.append(gradients_of(model))
                    optimizer.zero_grad()
        properties.assert_close(found[0], expected(model, data, rows_of(4)[:2], 2), 1e-5)

    def test_saving_in_mid_window_is_refused(self, tmp_path):
        accelerator, model, _, loader, clipper, _ = start(2, 4)
        with accelerator.accumulate(model):
            clipper.backward(losses(model), next(iter(loader)))
        with pytest.raises(RuntimeError, match="cannot hold half a step"):
            accelerator.save_state(tmp_path)

    def test_an_error_in_mid_window(self):
        """The window is dropped; the next one is complete."""
        accelerator, model, optimizer, loader, clipper, _ = start(2, 4)
        found = []
        for index, batch in enumerate(loader):
            with accelerator.accumulate(model):
                if index == 1:
                    with pytest.raises(ZeroDivisionError):
                        clipper.backward(lambda batch: 1 / 0, batch)
                elif clipper.backward(losses(model), batch):
                    found.append(gradients_of(model))
                    optimizer.step()
                    optimizer.zero_grad()
        assert clipper.clipper.step == len(found) == 2

    def test_overflow_skips_a_step_and_training_continues(self):
        """fp16: the scaler sees infinity, skips, halves its scale; zero_grad clears .grad."""
        accelerator, model, optimizer, loader, _, _ = start(1, 8)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        optimizer.scaler = accelerator.scaler
        optimizer.__setstate__({})
        clipper = AcceleratedClipper(accelerator, model, 2)
        before = [p.detach().clone() for p in model.parameters()]
        scales = []
        for index, batch in enumerate(loader):
            with accelerator.accumulate(model):
                factor = float("inf") if index == 0 else 1.0
                clipper.backward(lambda b, f=factor: losses(model)(b) * f, batch)
                optimizer.step()
                optimizer.zero_grad()
            scales.append(accelerator.scaler.get_scale())
            moved = any(
                not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
            )
            assert moved == (index > 0)
        assert scales[0] == 2.0**15
