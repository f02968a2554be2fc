"""What each rank runs in the tests of transformers, Accelerate and Lightning.

Child processes import this module by name. Every function trains for an epoch with a learning rate
of 0. For each optimizer step it returns the rows that this rank saw, one list per batch, and the
clipped gradient.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from microclip.microbatches import cut

import reference

COUNT = 22  # examples; on two ranks, the last window is shorter than the others
SCOPES = ("rank", "world")
REFUSED = ("unprepared", "unwrapped", "join")
Step = tuple[list[list[int]], list[torch.Tensor]]


class Rows(Dataset[Any]):
    """Examples with their row numbers."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int, int]:
        x, y = features()
        return x[row], int(y[row]), row


def features() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(COUNT, 4, generator=generator)
    return x, torch.randint(0, 3, (COUNT,), generator=generator)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def whole(gradient: Any) -> torch.Tensor:
    full: torch.Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return full.clone()


def launched(rank: int, world: int) -> None:
    """Make this process look like one started by torchrun; its process group exists already."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    group = {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29400}
    names = {**here, **group, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in names.items()})


def expected(
    model: nn.Module,
    loss_fn: Any,
    batch_of: Any,
    ranks: list[list[list[int]]],
    b: int | None,
    wide: bool = False,
) -> list[Any]:
    """Return the clipped gradient that one process computes from the rows of all ranks.

    Args:
        model: The model to differentiate.
        loss_fn: The mean loss of a batch.
        batch_of: Makes a batch from rows.
        ranks: For each rank, the rows of its batches in this step.
        b: The micro-batch size.
        wide: Whether a micro-batch spans several batches.
    """
    pieces: list[list[int]] = []
    for parts in ranks:
        if wide:
            parts = [[row for part in parts for row in part]]
        for part in parts:
            pieces += [list(m.ids) for m in cut(torch.tensor(part), b, ids=part)]
    batches = [batch_of(piece) for piece in pieces]
    gradients = reference.microbatch_gradients(loss_fn, list(model.parameters()), batches)
    sizes = [len(piece) for piece in pieces]
    return reference.clipped_gradient(gradients, sizes, reference.WEIGH["MinNorm()"])[0]


def each(
    rank: int, train: Callable[..., list[Step]], world: int, cases: list[tuple[Any, ...]]
) -> list[list[Step]]:
    """Return the result of every case; starting ranks takes longer than running them all."""
    launched(rank, world)
    return [train(world, *case) for case in cases]


def accelerate(
    world: int, size: int, steps: int, b: int | None, precision: str, how: str
) -> list[Step]:
    """`how`: "rank" and "world" are scopes, with a model that Accelerate's plugin shards."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, GradientAccumulationPlugin

    from microclip.integrations.accelerate import AcceleratedClipper

    from accelerate_runs import fresh_state

    fresh_state()
    windows = GradientAccumulationPlugin(steps, sync_each_batch=how == "sync_each_batch")
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_plugin=windows, mixed_precision=precision
    )
    if how in SCOPES:  # Accelerate offers its plugin on GPUs only, but it works on a CPU
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
        if precision != "no":
            plugin.set_mixed_precision(precision)
        AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
    model = bare = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(Rows(), batch_size=size)
    )
    if how in REFUSED:
        return [([], [_refusal(accelerator, bare, model, next(iter(loader)), how)])]
    options = {"scope": how} if how in SCOPES else {}
    clipper = AcceleratedClipper(accelerator, model, b, **options)

    def backward(batch: Any) -> Any:
        if how in SCOPES:  # this leaves the parameters of a sharded model unsharded
            with torch.no_grad():
                model(batch[0])
        return clipper.backward(lambda batch: loss(model, batch), batch)

    return accelerated_epoch(accelerator, model, optimizer, loader, backward)


def accelerated_epoch(
    accelerator: Any, model: Any, optimizer: Any, loader: Any, backward: Callable[[Any], Any]
) -> list[Step]:
    """Train as users of Accelerate do; `backward` gets a batch and returns the outcome."""
    found: list[Step] = []
    rows: list[list[int]] = []
    for batch in loader:
        with accelerator.accumulate(model):
            rows.append(batch[2].tolist())
            outcome = backward(batch)
            assert (outcome is not None) == accelerator.sync_gradients
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
                found.append((rows, [whole(p.grad) for p in model.parameters()]))
                rows = []
            optimizer.step()
            optimizer.zero_grad()
    return found


def _refusal(accelerator: Any, bare: Any, model: Any, batch: Any, how: str) -> Any:
    """Return the error of a loop whose ranks would diverge or hang."""
    from torch.distributed.algorithms import Join  # used by Accelerate, on GPUs only

    from microclip.integrations.accelerate import AcceleratedClipper

    given = {"unprepared": network(), "unwrapped": bare}.get(how, model)
    try:
        clipper = AcceleratedClipper(accelerator, given, 2)
        with Join([model]):
            clipper.backward(lambda batch: loss(given, batch), batch)
    except (ValueError, NotImplementedError) as error:
        return str(error)


def lightning(
    world: int, folder: str, steps: int, precision: str, size: int, b: int | None, skip: int
) -> list[Step]:
    """`skip`: training_step returns None for micro-batches with this row; -1 for none."""
    from microclip.integrations.lightning import MicrobatchClip

    return lightning_epoch(
        world, folder, MicrobatchClip(microbatch_size=b), size,
        lambda net, batch: None if skip in batch[2] else loss(net, batch),
        accumulate_grad_batches=steps, precision=precision, gradient_clip_val=100.0,
    )  # fmt: skip


def lightning_epoch(
    world: int,
    folder: str,
    callback: Any,
    size: int,
    loss_of: Callable[[nn.Module, Any], torch.Tensor | None],
    **options: Any,
) -> list[Step]:
    """Train with Lightning; `loss_of` computes what training_step returns."""
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    found: list[Step] = []
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
            self.net = network()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
            value = loss_of(self.net, batch)
            if value is not None and value.requires_grad:  # not while the callback only looks
                rows.append(batch[2].tolist())
            return value

        def configure_optimizers(self) -> Any:
            return Watched(self.parameters(), lr=0.0)

    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=DDPStrategy(process_group_backend="gloo"),
        logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1,
        enable_checkpointing=False, callbacks=[callback], default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(Rows(), batch_size=size))
    return found


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=17, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def sentences() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for row in range(COUNT):
        tokens = torch.randint(1, 17, (6,), generator=generator)
        found.append({"input_ids": tokens, "labels": tokens[0] % 3, "number": row})
    return found


def transformers(
    world: int, folder: str, size: int, steps: int, b: int | None, bf16: bool
) -> list[Step]:
    return trainer_epoch(folder, size, steps, {"microbatch_size": b}, bf16=bf16)


def trainer_epoch(
    folder: str, size: int, steps: int, clip: dict[str, Any], **arguments: Any
) -> list[Step]:
    """Train with `ClippedTrainer`; `clip` holds its own options."""
    from transformers import TrainerCallback, TrainingArguments

    from microclip.integrations.transformers import ClippedTrainer

    found: list[Step] = []
    rows: list[list[int]] = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gradients = [p.grad.clone() for p in kwargs["model"].parameters()]
            found.append((list(rows), gradients))
            rows.clear()

    class Watched(ClippedTrainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            rows.append(inputs["number"].tolist())
            return super().training_step(model, inputs, *args)

    given = TrainingArguments(
        folder, per_device_train_batch_size=size, gradient_accumulation_steps=steps,
        learning_rate=0.0, num_train_epochs=1, max_grad_norm=100.0, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, logging_strategy="no",
        ddp_backend="gloo", **arguments,
    )  # fmt: skip
    trainer = Watched(
        bert(), given, train_dataset=sentences(), callbacks=[Watch()], id_column="number", **clip
    )  # fmt: skip
    trainer.train()
    return found
