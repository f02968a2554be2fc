"""Gradient checkpointing and chunked cross-entropy: memory and time of a step, engine by engine.

    python benchmarks/checkpointing.py                      a small language model
    python benchmarks/checkpointing.py --rounds 0           memory alone

Memory is the peak of live tensors during a step, counted by the allocator. Times are ratios to a
plain step with the same checkpoints, within one round of an interleaved run, median with quartiles.
`adapters` trains two low-rank matrices beside every frozen projection, as LoRA does.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from microclip import Clipper
from microclip.losses import chunked_cross_entropy

from measure import interleaved, peak_memory, ratio

BATCH, LENGTH, WIDTH, DEPTH, WORDS, RANK = 8, 128, 128, 6, 8192, 4
CHECKPOINTS = {"none": None, "not reentrant": False, "reentrant": True}


class Projection(nn.Module):
    """A linear layer, perhaps with an adapter beside it."""

    def __init__(self, width: int, out: int, adapters: bool) -> None:
        super().__init__()
        self.base = nn.Linear(width, out)
        self.adapter = None
        if adapters:
            self.base.requires_grad_(False)
            down, up = nn.Linear(width, RANK, bias=False), nn.Linear(RANK, out, bias=False)
            self.adapter = nn.Sequential(down, up)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection."""
        return self.base(x) if self.adapter is None else self.base(x) + self.adapter(x)


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self, adapters: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.norms.requires_grad_(not adapters)
        self.qkv = Projection(WIDTH, 3 * WIDTH, adapters)
        self.out = Projection(WIDTH, WIDTH, adapters)
        self.up = Projection(WIDTH, 4 * WIDTH, adapters)
        self.down = Projection(4 * WIDTH, WIDTH, adapters)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next layer's input."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Language(nn.Module):
    """A language model that returns one loss per example."""

    def __init__(self, adapters: bool, reentrant: bool | None, chunked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.table.requires_grad_(not adapters)
        self.blocks = nn.ModuleList(Block(adapters) for _ in range(DEPTH))
        self.reentrant, self.chunked = reentrant, chunked

    def forward(self, ids: Tensor) -> Tensor:
        """Return the losses; the head is tied to the embeddings."""
        x = self.table(ids)
        if not x.requires_grad:  # else reentrant checkpoints would train nothing
            x.requires_grad_()
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        if self.chunked:
            return chunked_cross_entropy(x, self.table.weight, ids, shift=True)
        logits = F.linear(x[:, :-1], self.table.weight)
        return F.cross_entropy(logits.mT, ids[:, 1:], reduction="none").mean(1)


def plain(model: Language, ids: Tensor) -> None:
    """Take a plain step."""
    model.zero_grad()
    model(ids).mean().backward()  # type: ignore[no-untyped-call]


def clip(model: Language, clipper: Clipper, ids: Tensor) -> None:
    """Take a clipped step."""
    model.zero_grad()
    clipper.backward(model, ids)


def steps_of(model: Language, ids: Tensor) -> dict[str, Callable[[], object]]:
    """Return a plain step and clipped ones."""
    found: dict[str, Callable[[], object]] = {"plain": partial(plain, model, ids)}
    for engine, b in (("fused", 1), ("fused", 4), ("stream", 4)):
        clipper = Clipper(model, b, engine=engine, verify="never")
        found[f"{engine}, b = {b}"] = partial(clip, model, clipper, ids)
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    ids = torch.randint(0, WORDS, (BATCH, LENGTH))
    print("| trained | checkpoints | logits | step | MB | time |")
    print("| --- | --- | --- | --- | --- | --- |")
    for adapters, chunked, name in itertools.product((False, True), (False, True), CHECKPOINTS):
        model = Language(adapters, CHECKPOINTS[name], chunked)
        steps = steps_of(model, ids)
        for step in steps.values():
            step()
            step()
        seconds = interleaved(steps, options.rounds, warmup=0) if options.rounds else None
        for label, step in steps.items():
            model.zero_grad(set_to_none=True)
            megabytes = peak_memory(step) / 1e6
            taken = "-"
            if seconds is not None:
                middle, low, high = ratio(seconds, label, "plain")
                taken = f"{middle:.2f} ({low:.2f}-{high:.2f})"
            trained = "adapters" if adapters else "all"
            logits = "chunked" if chunked else "table"
            cells = trained, name, logits, label, f"{megabytes:.0f}", taken
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
