"""A small model and its data in Accelerate, with expected gradients, for Accelerate's tests."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from microclip.integrations.accelerate import AcceleratedClipper
from microclip.microbatches import cut

import reference

COUNT = 22


def fresh_state():
    """Reset Accelerate's global state, as in a new process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def start(steps=1, size=8, precision="no", b=2, **options):
    """Return everything a loop needs, prepared."""
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=steps, mixed_precision=precision
    )
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(COUNT, 4), torch.randint(0, 3, (COUNT,)))
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=size)
    )
    clipper = AcceleratedClipper(accelerator, model, b, **options)
    return accelerator, model, optimizer, loader, clipper, data.tensors


def losses(model):
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def rows_of(size, count=COUNT):
    """Return the rows of each batch."""
    return [list(range(i, min(i + size, count))) for i in range(0, count, size)]


def gradients_of(model):
    return [p.grad.clone() for p in model.parameters()]


def expected(model, data, parts, b):
    """Return the clipped gradient of a window, given the rows of its batches, by the reference."""
    pieces = [p for rows in parts for p in cut((data[0][rows], data[1][rows]), b)]
    gradients = reference.microbatch_gradients(
        losses(model), list(model.parameters()), [p.batch for p in pieces]
    )
    sizes = [p.size for p in pieces]
    return reference.clipped_gradient(gradients, sizes, reference.WEIGH["MinNorm()"])[0]
