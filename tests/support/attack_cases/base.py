"""What an attack is, how to make one of a forward pass, and data and layers for it.

Each function that `attack` decorates, in the other modules, is the forward pass of a model `m`,
whose parts are made by the keywords of the decorator: two linear layers, `m.one` and `m.two`, where
none are named. It gets the data `x` of some examples and their lengths `n`; the `whole` ones also
get `y`, and return the losses.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microclip.microbatches import cut

from reference import microbatch_gradients, weighted_sum
from verdicts import default_dtype, verdict

D = 4  # features
V = 7  # words


@dataclass(frozen=True)
class Attack:
    """A model, batches to put through it one after the other, and the loss of each example.

    `mixes`: what an example contributes depends on the others, so only streaming can be right.
    """

    name: str
    cause: str
    build: Callable[[int], nn.Module]
    batches: Callable[[], list[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    mixes: bool = False
    turn: Callable[[nn.Module, int], None] | None = None  # what happens between the batches

    def before(self, model, step):
        """Get the model ready for a batch; it knows which one it is, as a schedule would."""
        model.step = step
        if self.turn is not None:
            self.turn(model, step)

    def __str__(self):
        return f"{self.cause}: {self.name}"


class Sizes(NamedTuple):
    B: int = 8
    T: int = 4


ATTACKS: list[Attack] = []


class Net(nn.Module):
    """Parts, and a function that puts them to use."""

    def __init__(self, parts, forward, setup):
        super().__init__()
        for name, make in parts.items():
            part = make()
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)
        self.body = forward
        if setup is not None:
            setup(self)

    def forward(self, *args):
        return self.body(self, *args)


def attack(cause, *, sizes=(), data=None, mixes=False, whole=False, setup=None, turn=None, **parts):
    """Make an attack of a forward pass; `parts` are functions that make layers or parameters."""
    parts = parts or {"one": linear, "two": linear}

    def enter(forward):
        def build(seed=0):
            torch.manual_seed(seed)
            return Net(parts, forward, setup)

        def loss(model, batch):
            x, n, y = batch
            return model(x, n, y) if whole else smooth(model(x, n), y)

        def batches():
            return [batch(each, data or sequences, Sizes(*sizes)) for each in (full, even, ragged)]

        name = forward.__name__.replace("_", " ")
        ATTACKS.append(Attack(name, cause, build, batches, loss, mixes, turn))
        return forward

    return enter


def attempt(attack, engine, b=1, dtype=torch.float64, seed=0):
    """Say what an engine makes of an attack; `b`: None for the whole batch."""
    with default_dtype(dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = attack.build(seed)
        before, loss_fn = partial(attack.before, model), partial(attack.loss, model)
        return verdict(model, loss_fn, attack.batches(), engine, b, dtype, before)


def found_to_mix(attack):
    """Whether losses or gradients of the examples alone are not those that they have together."""
    with default_dtype(torch.float64), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = attack.build(0)
        return any(mixes(model, attack, *each) for each in enumerate(attack.batches()))


def mixes(model, attack, step, batch):
    attack.before(model, step)
    parameters, loss_fn = list(model.parameters()), partial(attack.loss, model)
    pieces = [piece.batch for piece in cut(batch, 1)]
    losses = torch.cat([loss_fn(piece).detach() for piece in pieces])
    alone = microbatch_gradients(loss_fn, parameters, pieces)
    together = microbatch_gradients(lambda part: loss_fn(part).sum(), parameters, [batch])
    flat = (flattened(parameters, weighted_sum(g, [1.0] * len(g))) for g in (alone, together))
    # sorted, since in whatever order the losses come, they are those of the same examples
    return not (
        torch.allclose(losses.sort().values, loss_fn(batch).detach().sort().values, rtol=1e-9)
        and torch.allclose(*flat, rtol=1e-7)
    )


def flattened(parameters, gradients):
    pairs = zip(parameters, gradients, strict=True)
    found = [torch.zeros_like(p) if g is None else g for p, g in pairs]
    return torch.cat([torch.view_as_real(g + 0j).flatten() for g in found])


# Data


def batch(lengths, data, sizes):
    """Examples, their lengths, and what their losses are weighted by."""
    n = lengths(*sizes)
    draw = torch.Generator().manual_seed(int(n.sum()))
    x = data(sizes, draw)
    return x, n, torch.randn(sizes.B, generator=draw) + 1


def full(B, T):
    return torch.full((B,), T)


def ragged(B, T):
    """Lengths from 1 to T, whose sum is no multiple of B where that can be."""
    n = 1 + (5 * torch.arange(B) + T - 1) % T
    if n.sum() % B == 0:
        n[1] = n[1] % T + 1
    return n


def even(B, T):
    """Lengths from 1 to T whose sum is a multiple of B: nothing in the shapes is suspicious."""
    n = ragged(B, T)
    while n.sum() % B:
        n[int(n.argmax())] -= 1
    return n


def sequences(sizes, draw):
    """Examples of different sizes, so that clipping has something to do."""
    return spread(torch.randn(sizes.B, sizes.T, D, generator=draw))


def shaped(*shape):
    return lambda sizes, draw: spread(torch.randn(sizes.B, *shape, generator=draw))


def words(sizes, draw):
    return torch.randint(0, V, (sizes.B, sizes.T), generator=draw)


def spread(x):
    size = torch.linspace(0.4, 1.6, len(x))
    return x * size.view(-1, *(1,) * (x.dim() - 1))


def smooth(out, y):
    """One loss per example, which is not the same for any two outputs."""
    out = torch.view_as_real(out) if out.is_complex() else out
    out = out.reshape(len(out), -1)
    return (1.3 * out).sin().mean(1) * y + out.square().mean(1)


# Parts

linear = partial(nn.Linear, D, D)
layer_norm = partial(nn.LayerNorm, D)
encoder_layer = partial(nn.TransformerEncoderLayer, D, 2, 8, 0.0)
words_table = partial(nn.Embedding, V, D)
images = shaped(2, 4, 4)
rows = shaped(D)


def weight(*shape):
    return lambda: 0.5 * torch.randn(shape)


def constant(value, *shape):
    return lambda: torch.full(shape, value)


def linears(count):
    return lambda: nn.ModuleList(linear() for _ in range(count))


def mlp(m, x):
    return m.two(m.one(x).tanh())


def kept(x, n):
    """Which positions are within their example's length."""
    return torch.arange(x.shape[1]) < n[:, None]


def owners(x, n):
    """The example of every position that is kept."""
    return torch.arange(len(x)).repeat_interleave(n)


def masked_mean(out, n):
    return (out * kept(out, n)[..., None]).sum(1) / n[:, None]
