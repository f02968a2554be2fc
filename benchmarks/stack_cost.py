"""What transformers, Accelerate and Lightning add to a clipped step, beyond the clipper's own work.

python benchmarks/stack_cost.py [--rounds 40]

Time inside our code of each integration, less the time inside `Clipper`, as a share of the step.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from microclip import Clipper

SIZE, LENGTH, B = 16, 64, 4


class Watch:
    """Adds up the time that is spent inside functions, not counting functions within functions."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._open = 0

    def over(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._open += 1
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._open -= 1
                if not self._open:
                    self.seconds += time.perf_counter() - start

        return timed


def model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000, hidden_size=224, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=600, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def data(steps: int, size: int = SIZE) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 1000, (steps * size, LENGTH))
    return [{"input_ids": row, "labels": row} for row in tokens]


def transformers(steps: int) -> list[float]:
    from transformers import TrainingArguments

    from microclip.integrations.transformers import ClippedTrainer

    outer, inner, shares = Watch(), Watch(), []

    class Timed(ClippedTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            before = outer.seconds, inner.seconds
            start = time.perf_counter()
            found = super().training_step(*args, **kwargs)
            outer.seconds += time.perf_counter() - start
            whole, core = outer.seconds - before[0], inner.seconds - before[1]
            shares.append((whole - core) / whole)
            return found

    inner.over(Clipper, "backward", "fold", "finish")
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=SIZE, max_steps=steps, report_to="none",
            save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        Timed(model(), args, train_dataset=data(steps), microbatch_size=B).train()
    return shares


def accelerate(steps: int) -> list[float]:
    from accelerate import Accelerator

    from microclip.integrations.accelerate import AcceleratedClipper

    accelerator = Accelerator(cpu=True)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data(steps), SIZE))
    clipper = AcceleratedClipper(accelerator, net, B)
    outer, inner, shares = Watch(), Watch(), []
    outer.over(clipper, "backward")
    inner.over(clipper.clipper, "backward", "fold", "finish")
    for batch in loader:
        before = outer.seconds, inner.seconds
        with accelerator.accumulate(net):
            clipper.backward(lambda batch: net(**batch).loss, batch)
            optimizer.step()
            optimizer.zero_grad()
        whole, core = outer.seconds - before[0], inner.seconds - before[1]
        shares.append((whole - core) / whole)
    return shares


def lightning(steps: int) -> list[float]:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from microclip.integrations.lightning import MicrobatchClip
    from microclip.integrations.lightning_steps import ClippedSteps

    outer, inner, shares = Watch(), Watch(), []
    callback = MicrobatchClip()
    outer.over(callback, "on_train_batch_end")
    outer.over(ClippedSteps, "training_step", "backward")
    inner.over(Clipper, "backward", "fold", "finish")
    inner.over(SingleDeviceStrategy, "training_step", "backward")

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()
            self.start = time.perf_counter()
            self.before = 0.0, 0.0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            now = time.perf_counter()
            ours = outer.seconds - self.before[0] - (inner.seconds - self.before[1])
            shares.append(ours / (now - self.start))
            self.start, self.before = now, (outer.seconds, inner.seconds)

    trainer = pl.Trainer(
        max_epochs=1, accumulate_grad_batches=SIZE // B, callbacks=[callback], accelerator="cpu",
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(data(steps), B))
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    parameters = sum(p.numel() for p in model().parameters())
    print(f"{parameters / 1e6:.1f}M parameters, {SIZE} texts of {LENGTH} tokens, b = {B}")
    for stack in (accelerate, lightning, transformers):
        shares = [100 * share for share in stack(rounds)[2:]]  # the first ones choose an engine
        low, middle, high = statistics.quantiles(shares, n=4)
        print(f"{stack.__name__:<14} {middle:.2f} % of the step ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    main()
