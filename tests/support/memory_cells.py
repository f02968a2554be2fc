"""What each rank runs in the tests of rules that weight examples, in all three stacks.

Child processes import this module by name. As in `stack_cells`: an epoch with a learning rate of 0,
and for each optimizer step the rows that this rank saw, and the gradient. `Seen` keys come last.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, SequentialSampler

from microclip.rules import ExampleRule

import stack_cells as cells


class ByKey(ExampleRule):
    """Weights that are known beforehand; keeps the keys it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def weigh(self, keys: torch.Tensor, losses: torch.Tensor | None) -> torch.Tensor:
        return (keys % 4) / 3

    def remember(self, seen: Any) -> None:
        self.seen.append(sorted(seen.keys.tolist()))


def losses(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def every(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Return what each stack found."""
    cells.launched(rank, world)
    warnings.simplefilter("ignore")
    return {
        "accelerate": accelerate(),
        "lightning": lightning(world, folder),
        "transformers": transformers(folder),
    }


def accelerate() -> tuple[list[cells.Step], ByKey]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from microclip.integrations.accelerate import AcceleratedClipper

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = cells.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(cells.Rows(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    rule = ByKey()
    clipper = AcceleratedClipper(accelerator, model, rule=rule)
    found: list[cells.Step] = []
    rows: list[list[int]] = []
    for batch in loader:
        with accelerator.accumulate(model):
            rows.append(batch[2].tolist())
            clipper.backward(lambda batch: losses(model, batch), batch, ids=batch[2])
            if accelerator.sync_gradients:
                found.append((rows, [cells.whole(p.grad) for p in model.parameters()]))
                rows = []
            optimizer.step()
            optimizer.zero_grad()
    return found, rule


def lightning(world: int, folder: str) -> tuple[list[cells.Step], ByKey]:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    from microclip.integrations.lightning import MicrobatchClip

    found: list[cells.Step] = []
    rows: list[list[int]] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            value = closure()
            gradients = [p.grad.clone() for g in self.param_groups for p in g["params"]]
            found.append((list(rows), gradients))
            rows.clear()
            return value

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = cells.network()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if torch.is_grad_enabled():
                rows.append(batch[2].tolist())
            return losses(self.net, batch)

        def configure_optimizers(self) -> Any:
            return Watched(self.parameters(), lr=0.0)

    rule = ByKey()
    callback = MicrobatchClip(rule, microbatch_size=3, ids=lambda batch: batch[2])
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=DDPStrategy(process_group_backend="gloo"),
        logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1,
        enable_checkpointing=False, callbacks=[callback], default_root_dir=folder,
        accumulate_grad_batches=2,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(cells.Rows(), batch_size=4))
    return found, rule


def transformers(folder: str) -> tuple[list[cells.Step], ByKey]:
    from transformers import TrainerCallback, TrainingArguments

    from microclip.integrations.transformers import ClippedTrainer

    found: list[cells.Step] = []
    rows: list[list[int]] = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found.append((list(rows), [p.grad.clone() for p in kwargs["model"].parameters()]))
            rows.clear()

    class Watched(ClippedTrainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            rows.append(inputs["number"].tolist())
            return super().training_step(model, inputs, *args)

    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=0.0,
        num_train_epochs=1, max_grad_norm=0.0, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, logging_strategy="no", ddp_backend="gloo",
    )  # fmt: skip
    rule = ByKey()
    trainer = Watched(
        cells.bert(), arguments, train_dataset=cells.sentences(), callbacks=[Watch()],
        rule=rule, id_column="number",
    )  # fmt: skip
    trainer.train()
    return found, rule
