"""Two hundred training steps with "auto" and drifting batches: every step equals the reference."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from microclip import Clipper

import verdicts

STEPS, B, D = 200, 12, 6


class Drifting(nn.Module):
    """Sorts by length, unpads, routes tokens to experts, and takes a branch now and then."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, D)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.router = nn.Linear(D, 3)
        self.rare = nn.GRU(D, D, batch_first=True)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 4)

    def forward(self, tokens, lengths):
        order = lengths.argsort(descending=True, stable=True)
        here = torch.arange(tokens.shape[1]) < lengths[order, None]
        rows = self.table(tokens[order])[here]
        chances = self.router(rows).softmax(-1)
        best = chances.argmax(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (chosen,) = (best == number).nonzero(as_tuple=True)
            if len(chosen):
                made = expert(rows[chosen]).tanh() * chances[chosen, number, None]
                out.index_add_(0, chosen, made)
        padded = torch.zeros(*tokens.shape, D).index_put(here.nonzero(as_tuple=True), out + rows)
        total = padded.sum(1) / lengths[order, None]
        if (tokens == 19).any():  # only some batches have it
            marked = (tokens[order] == 19).any(1, keepdim=True)
            total = torch.where(marked, total + self.rare(padded)[0][:, 0], total)
        return self.head(self.norm(total))[order.argsort()]


def batches(generator):
    """Short texts at first, then longer ones; the rare token starts late."""
    for step in range(STEPS):
        longest = 3 + step // 20 + int(torch.randint(0, 3, (), generator=generator))
        most = 20 if step > 60 and step % 7 == 0 else 19
        tokens = torch.randint(0, most, (B, longest), generator=generator)
        lengths = torch.randint(1, longest + 1, (B,), generator=generator)
        yield tokens, lengths, torch.randint(0, 4, (B,), generator=generator)


@pytest.mark.parametrize("engine", [pytest.param("auto", marks=pytest.mark.full), "fused"])
def test_every_step(engine):
    torch.manual_seed(0)
    model = Drifting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    clipper = Clipper(model, 2, engine=engine)

    def loss_fn(batch):
        tokens, lengths, labels = batch
        return F.cross_entropy(model(tokens, lengths), labels, reduction="none")

    engines, worst = set(), 0.0
    for batch in batches(torch.Generator().manual_seed(1)):
        expected = verdicts.wanted(model, loss_fn, batch, 2)
        model.zero_grad(set_to_none=True)
        engines.add(clipper.backward(loss_fn, batch).engine)
        error = verdicts.compare(model, expected, torch.float32)
        assert not error.is_too_large, error
        worst = max(worst, error.relative)
        optimizer.step()
    if engine == "fused":
        assert engines == {"fused"}
