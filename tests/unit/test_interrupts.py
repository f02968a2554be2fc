"""Ctrl-C at any line of a step: `.grad` is as it was, or the step is finished and counted.

Some lines here, more with the mark `full`, and all of them in benchmarks/interrupts.py.
"""

import signal
import threading
from contextlib import suppress

import pytest
import torch

import microclip
from microclip.interrupts import uninterrupted
from microclip.ledger import open_ledger

import interrupted

ENGINES = ("stream", "two_pass", "fused")
WAYS = {"raised": interrupted.raise_interrupt, "sent": interrupted.send_signal}


@pytest.fixture(autouse=True)
def _as_in_a_terminal():
    """Ctrl-C interrupts, which it does not in processes that a shell started in the background."""
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, handler)


def problems(cell, lines, way):
    """Strike at each of these lines; return what was wrong, with the place."""
    found = ((line, cell.strike(line, WAYS[way])) for line in lines)
    return [f"{cell.place}, line event {line}: {text}" for line, text in found if text]


@pytest.mark.sample(5)
@pytest.mark.parametrize("with_gradients", [True, False], ids=["accumulating", "empty"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", WAYS)
def test_between_two_lines(engine, with_gradients, way):
    """At every line where gradients are set aside or deposited, and some of the others."""
    cell = interrupted.Cell(engine, with_gradients)
    files = cell.lines()
    last = len(files) - files[::-1].index("clipper.py")
    places = ("clipper.py", "gradients.py", "step.py")
    near = [n for n, file in enumerate(files, 1) if file in places]
    chosen = {*near[:: max(1, len(near) // 25)], *range(1, len(files), len(files) // 15)}
    chosen |= {n for n in near if n > last - 100}  # the deposit is near the end
    assert problems(cell, sorted(chosen), way) == []


@pytest.mark.full
@pytest.mark.parametrize("with_gradients", [True, False], ids=["accumulating", "empty"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", WAYS)
def test_at_many_lines(engine, with_gradients, way):
    """At every eighth line, in each cell another eighth; benchmarks/interrupts.py has them all."""
    cell = interrupted.Cell(engine, with_gradients)
    first = 1 + 4 * list(WAYS).index(way) + 2 * with_gradients
    assert problems(cell, range(first, len(cell.lines()) + 1, 8), way) == []


@pytest.mark.parametrize("line", range(1, 400, 23))
def test_between_fold_and_finish(line):
    """What was folded is dropped as a whole, and `.grad` is as it was."""
    cell = interrupted.Cell("stream", True)
    half = cell.batch[:4], cell.batch[4:]

    def step():
        for part in half:
            cell.clipper.fold(cell.loss_fn, part)
        cell.clipper.finish()

    cell.step = step
    for how in WAYS.values():
        assert cell.strike(line * 3, how) == ""


@pytest.mark.parametrize(("engine", "every"), [("stream", 2), ("two_pass", 4), ("fused", 2)])
def test_no_hook_is_left_behind(engine, every):
    """Not even at the lines that add hooks to parameters and remove them again."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    parameters, batch = list(model.parameters()), torch.randn(6, 3)
    own = parameters[0].register_post_accumulate_grad_hook(lambda _: None)
    if engine == "fused":  # which refuses them
        own.remove()
    clipper = microclip.Clipper(model, 2, engine=engine, verify="always")

    def hooks():
        return [len(parameter._post_accumulate_grad_hooks or ()) for parameter in parameters]

    def step(line, how=None):
        with interrupted.Interrupter(line, how) as counter:
            clipper.backward(lambda x: model(x).square().mean(1), batch)
        return counter.places

    step(None)
    before, files = hooks(), step(None)
    places = [
        n for n, file in enumerate(files, 1) if file in ("gradients.py", "two_pass.py", "chunk.py")
    ]
    for line in places[::every]:
        with suppress(KeyboardInterrupt):  # some steps have fewer lines
            step(line, interrupted.send_signal)
        assert hooks() == before


def test_a_rule_and_a_ledger_know_every_finished_step(tmp_path):
    """With real signals, which are held back while the three are changed."""

    class Counting(microclip.rules.MinNorm):
        seen = 0

        def observe(self, norms, sizes):
            self.seen += 1
            if self.seen in (2, 3):
                signal.raise_signal(signal.SIGINT)

    model, rule = torch.nn.Linear(3, 1), Counting()
    batch = torch.randn(4, 3)
    with microclip.Ledger(tmp_path) as ledger:
        clipper = microclip.Clipper(model, 2, rule=rule, engine="stream", ledger=ledger)
        interrupts = 0
        for _ in range(4):
            try:
                clipper.backward(lambda x: model(x).square().mean(1), batch)
            except KeyboardInterrupt:
                interrupts += 1
    assert (interrupts, clipper.step, rule.seen) == (2, 4, 4)
    assert open_ledger(tmp_path).steps == range(4)


class TestUninterrupted:
    def test_the_handler_that_was_there_gets_it_at_the_end(self):
        seen = []
        before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
        try:
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                assert seen == []
            assert seen == [signal.SIGINT]
            signal.raise_signal(signal.SIGINT)
            assert len(seen) == 2
        finally:
            signal.signal(signal.SIGINT, before)

    def test_an_ignored_signal_stays_ignored(self):
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, before)

    def test_other_threads(self):
        found = []

        def work():
            with uninterrupted():
                found.append(signal.getsignal(signal.SIGINT))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found == [signal.getsignal(signal.SIGINT)]
