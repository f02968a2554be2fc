"""Interrupting a step at every line of the library that it executes, one after the other."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import microclip

ROOT = str(Path(microclip.__file__).parent)
RULES = {"MinNorm": microclip.rules.MinNorm, "Median": microclip.rules.Median}


class Interrupter:
    """Calls `strike` before the n-th line of the library; counts lines if n is None."""

    def __init__(self, line: int | None, strike: Any = None) -> None:
        self.line, self.strike, self.count = line, strike, 0
        self.places: list[str] = []  # the file of every line
        self.place = ""  # where it struck

    def __enter__(self) -> Interrupter:
        self._before = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _enter_frame(self, frame: Any, event: str, arg: Any) -> Any:
        return self._at_line if frame.f_code.co_filename.startswith(ROOT) else None

    def _at_line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.count += 1
            self.places.append(Path(frame.f_code.co_filename).name)
            if self.count == self.line:
                sys.settrace(None)
                name = Path(frame.f_code.co_filename).name
                self.place = f"{name}:{frame.f_lineno}"
                self.strike()
        return self._at_line


def raise_interrupt() -> None:
    """Raise at this very line, which no signal can do where signals are held back."""
    raise KeyboardInterrupt


def send_signal() -> None:
    """Do what Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


class Net(nn.Module):
    """Several parameters, one of which gets no gradient; drops out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return two numbers per example."""
        return self.body(x)


@dataclass
class Cell:
    """A step that can be taken again and again from the same state."""

    engine: str
    with_gradients: bool  # whether `.grad` holds something before the step
    rule: str = "MinNorm"

    def __post_init__(self) -> None:
        self.model = Net()
        self.rows: list[Any] = []
        rule = RULES[self.rule]()
        self.clipper = microclip.Clipper(
            self.model, 2, rule=rule, engine=self.engine, verify="never", ledger=None
        )
        self.batch = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
        self.reset()
        self.step()  # with what is done only once
        self.after = self.gradients()

    def loss_fn(self, x: torch.Tensor) -> torch.Tensor:
        """Return one loss per example."""
        return self.model(x).square().mean(1)

    def reset(self) -> None:
        """Put `.grad` into the state before the step."""
        for number, parameter in enumerate(self.model.parameters()):
            full = torch.full_like(parameter, 0.5 + number) if self.with_gradients else None
            parameter.grad = full
        self.before = [parameter.grad for parameter in self.model.parameters()]
        self.values = self.gradients()
        self.count = self.clipper.step
        self.handler = signal.getsignal(signal.SIGINT)

    def step(self) -> None:
        """Take the step."""
        self.clipper.backward(self.loss_fn, self.batch)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return copies of what is in `.grad`."""
        found = (parameter.grad for parameter in self.model.parameters())
        return [None if each is None else each.clone() for each in found]

    def lines(self) -> list[str]:
        """Return the file of every line of the library that a step executes."""
        self.reset()
        with Interrupter(None) as counter:
            self.step()
        return counter.places

    def strike(self, line: int, how: Any) -> str:
        """Interrupt a step before this line; return what is wrong afterwards, or ""."""
        self.reset()
        interrupter = Interrupter(line, how)
        try:
            with interrupter:
                self.step()
            if interrupter.place:
                return f"the interrupt was lost at {interrupter.place}"
        except KeyboardInterrupt:
            pass
        self.place = interrupter.place
        problem = self._problem()
        if problem:
            return problem
        self.reset()  # and the next step is the right one
        self.step()
        return "" if _equal(self.gradients(), self.after) else "the next step is another one"

    def _problem(self) -> str:
        if signal.getsignal(signal.SIGINT) is not self.handler:
            signal.signal(signal.SIGINT, self.handler)
            return "Ctrl-C is held back for good"
        now, steps = self.gradients(), self.clipper.step - self.count
        if steps == 1:
            return "" if _equal(now, self.after) else "counted, but .grad is not the result"
        if steps:
            return f"{steps} steps were counted"
        if not _equal(now, self.values):
            return "not counted, but .grad is not what it was"
        same = all(
            kept is parameter.grad
            for kept, parameter in zip(self.before, self.model.parameters(), strict=True)
        )
        return "" if same else "not counted, but .grad is another tensor"


def _equal(a: list[Any], b: list[Any]) -> bool:
    return all(
        (x is None) == (y is None) and (x is None or torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )
