"""What clipping costs: `stream` and `two_pass` against plain gradient accumulation, same b.

    python benchmarks/stream_cost.py                 about two minutes on two cores
    python benchmarks/stream_cost.py --rounds 31     a steadier figure

A GPT-like transformer of about 3M parameters on 64 tokens. Times are ratios within one round of
an interleaved run, median with quartiles; memory is the peak of live tensors, to the byte.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from microclip import Clipper

from measure import Step, interleaved, peak_memory, ratio

VOCABULARY, WIDTH, DEPTH, HEADS, TOKENS = 1024, 224, 4, 4, 64


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(DEPTH)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
        hidden = self.tokens(tokens) + self.positions
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(self.norm(hidden))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds per row")
    parser.add_argument("--batch-size", type=int, default=32, help="examples per step")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="B")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = GPT()
    batch = torch.randint(0, VOCABULARY, (options.batch_size, TOKENS))
    buffer = sum(p.numel() * p.element_size() for p in model.parameters())

    def loss_fn(tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens)[:, :-1].transpose(1, 2), tokens[:, 1:])

    print(
        f"{buffer // 4 / 1e6:.2f}M parameters, {TOKENS} tokens, batch of {options.batch_size}, "
        f"{torch.get_num_threads()} threads, {options.rounds} rounds; torch {torch.__version__}"
    )
    print("time: ratio to plain accumulation with the same b, median (quartiles)")
    print("memory: peak above plain accumulation's, in gradient buffers\n")
    print(f"{'b':>4}  {'stream time':>22} {'memory':>7}  {'two_pass time':>22} {'memory':>7}")
    for b in options.sizes:
        steps = {"plain": partial(accumulate, model, loss_fn, batch, b)}
        for engine in ("stream", "two_pass"):
            steps[engine] = partial(clip, Clipper(model, b, engine=engine), loss_fn, batch)
        seconds = interleaved(steps, options.rounds)
        peaks = {name: peak_from_nothing(model, step) for name, step in steps.items()}
        cells = []
        for engine in ("stream", "two_pass"):
            middle, low, high = ratio(seconds, engine, "plain")
            extra = (peaks[engine] - peaks["plain"]) / buffer
            cells.append(f"{middle:8.3f} ({low:.3f}-{high:.3f}) {extra:+7.2f}")
        print(f"{b:>4}  {'  '.join(f'{cell:>30}' for cell in cells)}", flush=True)


def peak_from_nothing(model: nn.Module, step: Step) -> int:
    model.zero_grad()
    return peak_memory(step)


def accumulate(model: nn.Module, loss_fn, batch: Tensor, b: int) -> None:
    model.zero_grad()
    for part in batch.split(b):
        (loss_fn(part) * (len(part) / len(batch))).backward()


def clip(clipper: Clipper, loss_fn, batch: Tensor) -> None:
    clipper.model.zero_grad()
    clipper.backward(loss_fn, batch)


if __name__ == "__main__":
    main()
