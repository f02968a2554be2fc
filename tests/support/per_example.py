"""Per-example gradients by plain autograd, one pass each: the reference for the probe."""

import torch

from microclip.microbatches import cut


def losses(case):
    return case.each_loss_fn or case.loss_fn


def materialized(case):
    """One gradient per example, by plain autograd, as rows of float64."""
    rows = []
    for part in cut(case.batch, 1):
        case.model.zero_grad()
        losses(case)(part.batch).sum().backward()
        found = []
        for p in case.parameters:
            g = torch.zeros_like(p) if p.grad is None else p.grad
            found.append((torch.view_as_real(g) if g.is_complex() else g).double().flatten())
        rows.append(torch.cat(found))
    case.model.zero_grad()
    return torch.stack(rows)
