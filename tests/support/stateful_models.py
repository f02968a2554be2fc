"""Models whose forward passes change a state, for the tests of engines that run them repeatedly.

`losses` returns one loss per example and changes the state; `state` returns it, to compare.
"""

import random

import numpy as np
import torch
from torch import nn


class Student(nn.Module):
    """A linear layer, to which the cases add a state."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x)

    def losses(self, x):
        return self(x).square().sum(1)


class EmaTeacher(Student):
    """A frozen teacher that follows in every forward pass, through `.data`."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(3, 2).requires_grad_(False)

    def losses(self, x):
        self.teacher.weight.data.mul_(0.5).add_(self.layer.weight.data, alpha=0.5)
        return (self(x) - self.teacher(x)).square().sum(1)

    def state(self):
        return self.teacher.weight


class ReplacedTeacher(EmaTeacher):
    """As in MoCo: `.data` is replaced."""

    def losses(self, x):
        teacher = self.teacher.weight
        teacher.data = teacher.data * 0.5 + self.layer.weight.data * 0.5
        return (self(x) - self.teacher(x)).square().sum(1)


class HiddenTeacher(EmaTeacher):
    """Kept in a list, so that it is no submodule."""

    def __init__(self):
        super().__init__()
        self.hidden = [self._modules.pop("teacher")]

    @property
    def teacher(self):
        return self.hidden[0]


class Codebook(Student):
    """Vectors that move towards what is assigned to them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 2))

    def losses(self, x):
        h = self(x)
        nearest = torch.cdist(h.detach(), self.codes).argmin(1)
        loss = (h - self.codes[nearest]).square().sum(1)
        with torch.no_grad():
            self.codes[nearest] += 0.3 * (h - self.codes[nearest])
        return loss

    def state(self):
        return self.codes


class Counter(Student):
    """A loss that grows with a number of calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def losses(self, x):
        self.calls += 1
        return super().losses(x) * (1 + 0.5 * self.calls)

    def state(self):
        return torch.tensor(self.calls)


class Reversal(Counter):
    """The loss is the same, the gradient is not."""

    def losses(self, x):
        self.calls += 1
        h = self(x)
        return (h + 0.1 * self.calls * (h - h.detach())).square().sum(1)


class Cache(Student):
    """Compares with what it has seen before."""

    def __init__(self):
        super().__init__()
        self.cache = []

    def losses(self, x):
        h = self(x)
        past = sum(self.cache) if self.cache else 0.0
        self.cache.append(h.detach().mean(0))
        return (h - past).square().sum(1)

    def state(self):
        return torch.stack(self.cache)


class Growing(Student):
    """A buffer that becomes longer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(1, 2))

    def losses(self, x):
        h = self(x)
        loss = (h - self.bank.mean(0)).square().sum(1)
        self.bank = torch.cat([self.bank, h.detach()])
        return loss

    def state(self):
        return self.bank


class Late(Student):
    """A buffer that is made by the first forward pass."""

    def losses(self, x):
        h = self(x)
        if not hasattr(self, "center"):
            self.register_buffer("center", torch.zeros(2))
        loss = (h - self.center).square().sum(1)
        self.center = 0.5 * self.center + 0.5 * h.detach().mean(0)
        return loss

    def state(self):
        return self.center


class Attribute(Student):
    """A tensor that is an attribute and no buffer, written in place."""

    def __init__(self):
        super().__init__()
        self.center = torch.zeros(2)

    def losses(self, x):
        h = self(x)
        loss = (h - self.center).square().sum(1)
        self.center.mul_(0.5).add_(h.detach().mean(0))
        return loss

    def state(self):
        return self.center


class OwnGenerator(Student):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def losses(self, x):
        noise = torch.randn(x.shape, generator=self.generator)
        return super().losses(x + noise)

    def state(self):
        return self.generator.get_state()


class PythonRandom(Student):
    def losses(self, x):
        return super().losses(x) * (1 + random.random())

    def state(self):
        return torch.tensor(random.getstate()[1])


class NumpyRandom(Student):
    def losses(self, x):
        return super().losses(x) * (1 + np.random.rand())

    def state(self):
        return torch.tensor(np.random.get_state()[2])


class OwnRandoms(Student):
    def __init__(self):
        super().__init__()
        self.python, self.numpy = random.Random(1), np.random.default_rng(2)

    def losses(self, x):
        return super().losses(x) * (1 + self.python.random() + self.numpy.random())

    def state(self):
        return torch.tensor([self.python.random(), self.numpy.random()])


class Nested(Student):
    """Tensors in a dict in a list."""

    def __init__(self):
        super().__init__()
        self.memory = [{"center": torch.zeros(2)}]

    def losses(self, x):
        h = self(x)
        center = self.memory[0]["center"]
        loss = (h - center).square().sum(1)
        center.add_(h.detach().mean(0))
        return loss

    def state(self):
        return self.memory[0]["center"]


class Statistics(Student):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, affine=False)

    def losses(self, x):
        return super().losses(self.norm(x))

    def state(self):
        return self.norm.running_mean


class NumpyState(Student):
    def __init__(self):
        super().__init__()
        self.counts = np.zeros(3)

    def losses(self, x):
        self.counts += 1
        return super().losses(x) * float(self.counts[0])

    def state(self):
        return torch.tensor(self.counts)


class WithBackward(Student):
    """Differentiates something itself, inside the forward pass."""

    def losses(self, x):
        (0.1 * self(x).sum()).backward()
        return super().losses(x)

    def state(self):
        return torch.zeros(())


class Distill(Student):
    """Adds to the gradient of a frozen module that is switched on for a moment."""

    def __init__(self):
        super().__init__()
        self.probe = nn.Linear(2, 1).requires_grad_(False)

    def losses(self, x):
        self.probe.requires_grad_(True)
        self.probe(self(x).detach()).sum().backward()
        self.probe.requires_grad_(False)
        size = self.probe.weight.grad.norm().detach()
        return super().losses(x) * (1 + size)

    def state(self):
        return self.probe.weight.grad


STATEFUL = [
    EmaTeacher, ReplacedTeacher, HiddenTeacher, Codebook, Counter, Reversal, Cache, Growing, Late,
    Attribute, OwnGenerator, PythonRandom, NumpyRandom, OwnRandoms, Nested, Statistics, NumpyState,
    WithBackward, Distill,
]  # fmt: skip
