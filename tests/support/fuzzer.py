"""Random networks of layers and of operations that move rows, to test the single pass with.

A program is made from one number: layers that work on features (linear layers, norms, scales,
look-ups), layers that work along an example (attention, convolution, positions), and detours,
inside of which the rows lie differently: sorted, permuted, flattened, unpadded, repeated, cut,
routed to experts. After a detour they are put back. A program runs on any number of examples, and
an example's loss does not depend on the others, unless the program `mixes`, as few do.

    python tests/support/fuzzer.py --first 0 --count 1000 --engines fused auto --sizes 1 3 B
    python tests/support/fuzzer.py --first 0 --count 200 --drift        six different batches, auto
    python tests/support/fuzzer.py --show 17                            what program 17 is made of

This module makes programs, runs them and has the command line; their parts are in `fuzz_layers` and
`fuzz_detours`.
"""

import argparse
import itertools
import json
import logging
import random
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from microclip.microbatches import cut

from fuzz_detours import DETOURS
from fuzz_layers import LAYERS
from fuzz_rows import DEPTH, WORDS, Block, Flow
from reference import microbatch_gradients, weighted_sum
from verdicts import default_dtype, is_bad, kind, summary, verdict

MIXES = 0.03  # of all programs
BATCHES = 6  # of a drifting program


class Maker:
    """Draws a program."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.B = self.draw.randint(4, 7)
        self.T = self.draw.choice([self.B, self.draw.randint(2, 6)])
        self.D = self.draw.choice([self.B, *[self.draw.randint(3, 5)] * 2])
        self.K = self.draw.choice([2, 2, 3])
        self.length = self.draw.choice([4, 4, 4, 6])
        self.mixes = self.draw.random() < MIXES
        self.linears = []

    def maybe(self, chance):
        return self.draw.random() < chance

    def block(self, groups, depth=0, least=1):
        """Make a few modules for rows that lie like this."""
        count = self.draw.randint(least, max(least, self.length - depth))
        return Block([self.module(groups, depth) for _ in range(count)])

    def module(self, groups, depth):
        while True:
            detour = depth < DEPTH and self.maybe(0.45)
            table = DETOURS if detour else LAYERS
            make = self.draw.choices(list(table), list(table.values()))[0]
            made = make(self, groups, depth + 1) if detour else make(self, groups)
            if made is not None:
                return made

    def weight(self, *shape):
        return nn.Parameter(torch.randn(shape) / max(1, shape[-1] if shape else 1) ** 0.5)

    def linear(self):
        """A new linear layer, or one that is used elsewhere, too."""
        if not self.linears or self.maybe(0.85):
            self.linears.append(nn.Linear(self.D, self.D))
        return self.draw.choice(self.linears)


# What mixes


class Mixing(nn.Module):
    """Something of other examples."""

    def __init__(self, spelling):
        super().__init__()
        self.spelling = spelling

    def forward(self, flow):
        return MIX[self.spelling](flow.h)

    def extra_repr(self):
        return self.spelling


MIX = {
    "mean": lambda h: h - 0.5 * h.mean(0),
    "detached": lambda h: h / (1 + h.detach().square().mean()),
    "number": lambda h: h * (1 + h.abs().max().item()),
    "softmax": lambda h: h * (1 + h.softmax(0)),
    "neighbour": lambda h: h + 0.3 * h.roll(1, 0).tanh(),
    "cumsum": lambda h: h + 0.3 * h.cumsum(0).tanh(),
    "size": lambda h: h * len(h) ** 0.5,
}


# Programs


class Program(nn.Module):
    """From the data of some examples to one loss for each."""

    def __init__(self, maker):
        super().__init__()
        D = maker.D
        self.data = maker.draw.choice(["sequences", "sequences", "words", "images"])
        self.loss = maker.draw.choice(list(LOSSES))
        self.sizes = {"T": maker.T, "D": D}
        if self.data == "words":
            self.table = nn.Embedding(WORDS, D)
        elif self.data == "images":
            self.conv = nn.Conv2d(2, D, (2, 3), padding=(0, 1))
        self.body = maker.block((("B",), ("T",)), least=3)
        if maker.mixes:
            mixing = Mixing(maker.draw.choice(list(MIX)))
            self.body.insert(maker.draw.randint(0, len(self.body)), mixing)
        self.head = nn.Linear(D, 3)

    def extra_repr(self):
        return f"{self.data}, {self.loss}, {self.sizes}"

    def forward(self, batch):
        x, key = batch["x"], batch["key"]
        h = x
        if self.data == "words":
            h = self.table(x)
        elif self.data == "images":
            h = self.conv(x).flatten(2).mT
        kept = torch.arange(key.shape[1]) < batch["n"][:, None]
        owner = torch.arange(len(x))[:, None].expand(key.shape)
        key = torch.stack([key, kept.to(key.dtype), owner.to(key.dtype)], -1)
        out = self.head(self.body(Flow(h, key, len(x))))
        return LOSSES[self.loss](out, kept, batch["y"], batch["n"])


def token_losses(out, y):
    rows = out.flatten(0, -2)
    first = torch.zeros(len(rows), dtype=torch.long)
    return F.cross_entropy(rows, first, reduction="none") * y.flatten()


def unpadded_loss(out, kept, y, n):
    each = token_losses(out[kept], y.repeat_interleave(n))
    owner = torch.arange(len(n)).repeat_interleave(n)
    return torch.zeros(len(n)).index_add(0, owner, each) / n


def split_loss(out, kept, y, n):
    each = out[kept].square().mean(1)
    return torch.stack([part.mean() for part in each.split(n.tolist())]) * y


def wavy_loss(out, kept, y, n):
    out = out.flatten(1)
    return (1.3 * out).sin().mean(1) * y + out.square().mean(1)


def masked_loss(out, kept, y, n):
    each = token_losses(out, y[:, None].expand(kept.shape)).view(kept.shape)
    return (each * kept).sum(1) / n


def sorted_loss(out, kept, y, n):
    return wavy_loss(out, kept, y, n)[n.argsort(stable=True)]


def time_first_loss(out, kept, y, n):
    out = out.transpose(0, 1)
    return (F.huber_loss(out, out.detach().sin(), reduction="none").mean(-1) * kept.T).sum(0) * y


LOSSES = {
    "wavy": wavy_loss,
    "unpadded": unpadded_loss,
    "masked": masked_loss,
    "split": split_loss,
    "sorted": sorted_loss,
    "time first": time_first_loss,
}


def made(seed):
    """Return a program, and whoever made it."""
    maker = Maker(seed)
    torch.manual_seed(seed)
    model = Program(maker)
    model.mixes = maker.mixes
    return model, maker


def data(model, maker, seed, calm=False, fewer=0):
    """Return a batch for a program; the lengths and all that routes are drawn with it.

    A calm one has full lengths, is sorted, and goes to the first expert.
    """
    draw = torch.Generator().manual_seed(seed)
    B, T = maker.B - fewer, maker.T
    normal = partial(torch.randn, generator=draw)
    if model.data == "words":
        x = torch.randint(0, WORDS, (B, T), generator=draw)
    elif model.data == "images":
        x = normal(B, 2, 2, T)
    else:
        x = normal(B, T, maker.D) * torch.linspace(0.5, 1.5, B).view(-1, 1, 1)
    n = torch.randint(1, T + 1, (B,), generator=draw)
    key, y = normal(B, T), normal(B) + 1.5
    if calm:
        n, key = torch.full_like(n, T), torch.linspace(0.1, 0.2, B * T).view(B, T)
    return {"x": x, "key": key, "n": n, "y": y}


def program(seed):
    """Return (model, batch, loss_fn), all from one number."""
    with default_dtype(torch.float64):
        model, maker = made(seed)
        return model, data(model, maker, seed), partial(run, model)


def run(model, batch):
    with default_dtype(torch.float64):
        return model(batch)


def check(seed, engine, b=1, segment=None):
    """Say what an engine makes of a program; `b`: None for the whole batch.

    `segment`: checkpoints every module, and those inside of it again.
    """
    model, batch, loss_fn = program(seed)
    for module in model.modules():
        if isinstance(module, Block):
            module.segment = segment
    with default_dtype(torch.float64):  # also in the backward pass, where segments run again
        return verdict(model, loss_fn, [batch], engine, b)


def drift(seed, engine="auto", b=1):
    """The same with one batch after the other, other lengths and routes each time.

    Often the first one is calm, and one in between is smaller.
    """
    with default_dtype(torch.float64):
        model, maker = made(seed)
        batches = [
            data(model, maker, BATCHES * seed + step, step == 0 and seed % 2 == 0, int(step == 3))
            for step in range(BATCHES)
        ]
    return verdict(model, partial(run, model), batches, engine, b)


def found_to_mix(seed):
    """Whether the examples' gradients alone do not add up to those that they have together."""
    model, batch, loss_fn = program(seed)
    parameters = list(model.parameters())
    pieces = [piece.batch for piece in cut(batch, 1)]
    alone = microbatch_gradients(loss_fn, parameters, pieces)
    (whole,) = microbatch_gradients(lambda part: loss_fn(part).sum(), parameters, [batch])
    total = weighted_sum(alone, [1.0] * len(alone))
    zeros = [torch.zeros_like(p) for p in parameters]
    pairs = (
        [zero if g is None else g for zero, g in zip(zeros, found, strict=True)]
        for found in (whole, total)
    )
    return not all(torch.allclose(a, b, rtol=1e-8, atol=1e-10) for a, b in zip(*pairs, strict=True))


# The command line


class Counts:
    """Verdicts of one engine and size."""

    def __init__(self, title):
        self.title = title
        self.all, self.mixing = [], []

    def add(self, seed, said, mixes):
        self.all.append((seed, said))
        if mixes:
            self.mixing.append(said)

    @property
    def is_bad(self):
        return any(is_bad(said) for _, said in self.all)

    def __str__(self):
        lines = [f"{self.title}: {summary(said for _, said in self.all)}"]
        if self.mixing:
            lines.append(f"  of these mix: {summary(self.mixing)}")
        for name in ("WRONG", "CRASH"):
            seeds = [str(seed) for seed, said in self.all if kind(said) == name]
            if seeds:
                lines.append(f"  {name}: {' '.join(seeds[:60])}{' ...' * (len(seeds) > 60)}")
        return "\n".join(lines)


def size(text):
    return None if text == "B" else int(text)


def arguments(argv):
    parser = argparse.ArgumentParser(description="Try the single pass with random networks.")
    parser.add_argument("--first", type=int, default=0, help="the first program's number")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--engines", nargs="+", default=["fused"])
    parser.add_argument("--sizes", nargs="+", type=size, default=[1], help="numbers, or B")
    parser.add_argument("--drift", action="store_true", help="six batches for each, under auto")
    parser.add_argument("--out", type=Path, help="a file for all verdicts, one line each")
    parser.add_argument("--show", type=int, help="print this program and what becomes of it")
    return parser.parse_args(argv)


def show(seed, engines, sizes):
    model, batch, _ = program(seed)
    print(model)
    print({name: tuple(leaf.shape) for name, leaf in batch.items()}, "mixes:", model.mixes)
    for engine, b in itertools.product(engines, sizes):
        print(f"{engine} b={b or 'B'}: {check(seed, engine, b)}")


def main(argv=None):
    options = arguments(argv)
    torch.set_num_threads(1)
    logging.getLogger("microclip").setLevel(logging.ERROR)
    if options.show is not None:
        show(options.show, options.engines, options.sizes)
        return False
    engines = ["auto"] if options.drift else options.engines
    cells = list(itertools.product(engines, options.sizes))
    counts = {cell: Counts(f"{cell[0]} b={cell[1] or 'B'}") for cell in cells}
    start, lines = time.perf_counter(), []
    for seed in range(options.first, options.first + options.count):
        mixes = Maker(seed).mixes
        for engine, b in cells:
            said = drift(seed, engine, b) if options.drift else check(seed, engine, b)
            counts[engine, b].add(seed, said, mixes)
            lines.append(json.dumps({"seed": seed, "engine": engine, "b": b, "said": said}))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    print(f"{options.count} programs in {time.perf_counter() - start:.0f} s")
    print(*counts.values(), sep="\n")
    return any(count.is_bad for count in counts.values())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
