"""The real Accelerate: accumulation windows are clipped as the reference does it."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from microclip import rules
from microclip.integrations.accelerate import AcceleratedClipper
from microclip.microbatches import cut

import properties
import reference
from accelerate_runs import expected, fresh_state, gradients_of, losses, rows_of, start


@pytest.fixture(autouse=True)
def fresh():
    fresh_state()


@pytest.mark.parametrize(
    ("size", "steps", "b", "precision"),
    [(8, 1, 2, "no"), (4, 2, 2, "no"), (4, 2, None, "no"), (4, 2, 3, "no"), (4, 2, 2, "bf16")],
)
def test_windows_equal_the_reference(size, steps, b, precision):
    accelerator, model, optimizer, loader, clipper, data = start(steps, size, precision, b)
    parts = rows_of(size)
    windows = [parts[i : i + steps] for i in range(0, len(parts), steps)]
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            clipper.backward(losses(model), batch)
            if accelerator.sync_gradients:
                found.append(gradients_of(model))
                wanted = expected(model, data, windows[len(found) - 1], b)
                properties.assert_close(found[-1], wanted, 0.05 if precision == "bf16" else 1e-5)
            else:
                assert all(p.grad is None for p in model.parameters())
            optimizer.zero_grad()
    assert len(found) == len(windows) == 3
    assert clipper.metrics()["microclip/bound"] > 0


def test_checkpoints_save_the_clipper(tmp_path):
    accelerator, model, optimizer, loader, clipper, _ = start(2, 4)
    for batch in loader:
        with accelerator.accumulate(model):
            clipper.backward(losses(model), batch)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(tmp_path)
    assert clipper.clipper.step == 3
    fresh_state()
    accelerator, _, _, _, again, _ = start(2, 4)
    accelerator.load_state(tmp_path)
    assert again.clipper.step == 3


def test_one_microbatch_is_plain_training():
    weights = []
    for clipped in (False, True):
        fresh_state()
        accelerator, model, optimizer, loader, clipper, _ = start(1, 8, b=None)
        for batch in loader:
            with accelerator.accumulate(model):
                if clipped:
                    clipper.backward(losses(model), batch)
                else:
                    accelerator.backward(losses(model)(batch))
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        weights.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)


def train(loader, accelerator, model, optimizer, clipper, until=None):
    """Train for an epoch, or for the given number of batches."""
    for count, batch in enumerate(loader, start=1):
        with accelerator.accumulate(model):
            clipper.backward(losses(model), batch)
            optimizer.step()
            optimizer.zero_grad()
        if count == until:
            return


def test_resuming_in_an_epoch_gives_the_same_weights(tmp_path):
    accelerator, model, optimizer, loader, clipper, _ = start(2, 4)
    train(loader, accelerator, model, optimizer, clipper)
    whole = [p.detach().clone() for p in model.parameters()]

    fresh_state()
    accelerator, model, optimizer, loader, clipper, _ = start(2, 4)
    train(loader, accelerator, model, optimizer, clipper, until=4)
    accelerator.save_state(tmp_path)

    fresh_state()
    accelerator, model, optimizer, loader, clipper, _ = start(2, 4)
    accelerator.load_state(tmp_path)
    train(accelerator.skip_first_batches(loader, 4), accelerator, model, optimizer, clipper)
    assert clipper.clipper.step == 3
    for one, other in zip(whole, model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_scaled_losses():
    """The clipper uses Accelerate's float16 scaler; norms are those of unscaled losses."""
    accelerator, model, _, loader, _, data = start(2, 4)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    clipper = AcceleratedClipper(accelerator, model, 2, rule=rules.Fixed(0.1))
    rows = [list(range(i, i + 4)) for i in (0, 4)]
    for batch, _ in zip(loader, range(2), strict=False):
        with accelerator.accumulate(model):
            clipper.backward(losses(model), batch)
    found = gradients_of(model)
    pieces = [p for part in rows for p in cut((data[0][part], data[1][part]), 2)]
    gradients = reference.microbatch_gradients(
        losses(model), list(model.parameters()), [p.batch for p in pieces]
    )
    norms = [reference.norm(g) for g in gradients]
    weights = [min(1.0, 0.1 / norm) for norm in norms]
    assert max(norms) > 0.1
    wanted = reference.weighted_sum(gradients, [1024 * w / 4 for w in weights])
    properties.assert_close(found, wanted, 1e-5)


def test_deepspeed_is_refused():
    accelerator, model, *_ = start()
    AcceleratorState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    with pytest.raises(NotImplementedError, match="DEEPSPEED .* Use DDP or FSDP2"):
        AcceleratedClipper(accelerator, model, 2)


def test_fsdp_version_1_is_refused(monkeypatch):
    accelerator, model, *_ = start()
    AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(NotImplementedError, match="fsdp_version=2"):
        AcceleratedClipper(accelerator, model, 2)
