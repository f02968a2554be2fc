"""The training loop: one for every recipe, on one process or many.

The recipe defines what is trained, the clipper what a step does to gradients, and Accelerate
handles devices and processes. Results go to the folder of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from microclip.rules import ExampleRule, Rule
from microclip_lab.training.checkpoints import Checkpoints, State, load_weights
from microclip_lab.training.components import optimizer_of, rule_of, schedule_of
from microclip_lab.training.config import DivergedError, Training
from microclip_lab.training.evaluation import evaluate
from microclip_lab.training.interruption import Stopped, StopRequests
from microclip_lab.training.loading import Loaded, Order, Share, training_parts
from microclip_lab.training.progress import StepProgress
from microclip_lab.training.recipe import Data, Recipe
from microclip_lab.training.run_logger import RunLogger
from microclip_lab.training.training_state import TrainingState

if TYPE_CHECKING:
    from rich.console import Console

    from microclip.integrations.accelerate import AcceleratedClipper
    from microclip.outcome import Outcome

Watch = Callable[[int, dict[str, float]], None]

CHECK_STOP_EVERY = 10  # steps: checking all processes for stop requests takes communication
PATIENCE = 3  # consecutive non-finite losses before a run is abandoned


@dataclass(frozen=True)
class Finished:
    """The result of a call of `train`."""

    path: Path  # the run's folder
    step: int
    metrics: dict[str, float]  # (best_)validation_*; after the last step also (best_)test_*
    best_step: int | None


def train(
    recipe: Recipe[Any, Any],
    training: Training,
    *,
    until: int | None = None,
    watch: Watch | None = None,
    rule: Rule | None = None,
    command: str | None = None,
    console: Console | None = None,
) -> Finished:
    """Train a recipe, or resume a run.

    Args:
        recipe: What to train.
        training: How to train it.
        until: Stop after this step, with a checkpoint; a call with resume=True continues.
        watch: Called after every evaluation on validation data, on every process, with the step and
            the figures; an exception it raises ends the run.
        rule: A rule object, such as your own; `training.rule` is then only its name in the run's
            settings.
        command: The command to record as the one that repeats the run.
        console: Where to show progress; None shows nothing.
    """
    with (
        _threads(training.threads),
        StopRequests() as requests,
        RunLogger.open(recipe, training, command) as logger,
    ):
        return _Run(recipe, training, logger, requests, watch, rule, console).run(until)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Run:
    """One run: loads or creates its state, trains, and writes results."""

    def __init__(
        self,
        recipe: Recipe[Any, Any],
        training: Training,
        logger: RunLogger,
        requests: StopRequests,
        watch: Watch | None,
        rule: Rule | None,
        console: Console | None,
    ) -> None:
        from accelerate.utils import set_seed

        from microclip.integrations.accelerate import AcceleratedClipper

        self.recipe, self.training, self.logger = recipe, training, logger
        self.requests, self.watch = requests, watch
        self.accelerator = accelerator = logger.accelerator
        self.console = console if accelerator.is_main_process else None
        self.share = Share.of(training, accelerator.process_index, accelerator.num_processes)
        set_seed(training.seed)
        self.data: Data[Any] = recipe.load(training.seed)
        self._check_data()
        self.steps = training.all_steps(len(self.data.training))
        self.order = Order(len(self.data.training), training.batch_size, training.seed)
        torch.manual_seed(training.seed)  # whatever numbers loading has drawn
        model = recipe.build(self.data)
        if training.start_from is not None:
            load_weights(model, training.start_from)
        model.train()
        self.model: nn.Module
        self.model, self.optimizer = accelerator.prepare(model, optimizer_of(training, model))
        # if prepared, Accelerate would step it once per process
        self.schedule = schedule_of(training, self.optimizer.optimizer, self.steps)
        rule = rule_of(training, self.steps, rule)
        self.is_plain = training.microbatch_size is None and not isinstance(rule, ExampleRule)
        self.clipper: AcceleratedClipper = AcceleratedClipper(
            accelerator,
            self.model,
            training.microbatch_size,
            rule=rule,
            engine=training.engine,
            ledger=logger.ledger,
        )
        set_seed(training.seed, device_specific=True)  # dropout must differ between processes
        self.training_state = TrainingState(
            accelerator, self.model, self.optimizer.optimizer, self.schedule, self.clipper
        )
        self.checkpoints = Checkpoints(logger.path, accelerator)
        self.state = State()
        checkpoint = self.checkpoints.last() if training.resume else None
        if checkpoint is not None:
            self.state = self.checkpoints.read(checkpoint, self.training_state)
        self.evaluate_every = training.evaluate_every or max(1, self.steps // 20)
        self.checkpoint_every = training.checkpoint_every or self.evaluate_every
        self.bad_losses = 0
        self.last = self.steps  # of this call
        self.gradient_norm: torch.Tensor | None = None  # before max_grad_norm; of a logged step
        self.figures: dict[str, float] = {}

    def run(self, until: int | None) -> Finished:
        """Take the missing steps; after the last one, evaluate on test data."""
        self.last = self.steps if until is None else min(until, self.steps)
        self.logger.begin(self.state.step, self._facts())
        parts = training_parts(
            self.recipe,
            self.data,
            self.order,
            self.share,
            range(self.state.step, self.last),
            self.training.workers,
        )
        size = self.training.batch_size
        with StepProgress(self.console, self.steps, self.state.step, size) as progress:
            for part in parts:
                outcome = self._differentiate(part)
                if outcome is None:
                    continue
                self._optimizer_step(part.part.step + 1)
                self.state = replace(self.state, step=part.part.step + 1)
                progress.step(self.state.step)
                self._after_step(outcome, progress)
        if self.state.step < self.steps:
            return self._finished()
        if not self.figures:  # it had finished before: report the same figures again
            self.figures = self._evaluate(self.data.validation, "validation_")
        self._test()
        self.logger.describe(self.recipe, self.data)
        return self._finished()

    def _differentiate(self, loaded: Loaded) -> Outcome | None:
        """Fold a part; after the last one of a step, the clipped gradient is in `.grad`."""
        from accelerate.utils import send_to_device

        batch = send_to_device(loaded.batch, self.accelerator.device)
        options: dict[str, Any] = {"ids": loaded.ids}
        if self.training.by_domain and not self.is_plain:
            options["domains"] = loaded.domains
        clipper = self.clipper.clipper

        def loss_fn(batch: Any) -> torch.Tensor:
            return self.recipe.losses(self.model, batch)

        if loaded.part.count * self.share.world == self.share.batch_size:
            return clipper.backward(loss_fn, batch, **options)
        clipper.fold(loss_fn, batch, **options)
        return clipper.finish() if loaded.part.is_last else None

    def _optimizer_step(self, step: int) -> None:
        bound = self.training.max_grad_norm
        if bound is not None or self._is_logged(step):
            # an infinite bound leaves gradients unchanged, and returns their norm
            norm = self.accelerator.clip_grad_norm_(
                self.model.parameters(), math.inf if bound is None else bound
            )
            self.gradient_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.optimizer.step()
        if not self.optimizer.step_was_skipped:
            self.schedule.step()
        self.optimizer.zero_grad()

    def _after_step(self, outcome: Outcome, progress: StepProgress) -> None:
        """Log, evaluate, write checkpoints and check for stop requests, each when it is due."""
        step = self.state.step
        if self._is_logged(step):
            self._log(outcome)
        evaluating = step % self.evaluate_every == 0 or step == self.last
        if evaluating:
            self._validate()
            progress.evaluated(step, self.figures)
        stopping = self._stop_requested()
        if (
            step % self.checkpoint_every == 0 or step == self.last or stopping
        ) and not self.bad_losses:
            self.checkpoints.write(self.state, self.training_state)
        if evaluating and self.watch is not None:
            self.watch(step, dict(self.figures))
        if stopping:
            raise Stopped(stopping, step)

    def _is_logged(self, step: int) -> bool:
        return step % self.training.log_every == 0 or step == self.last

    def _log(self, outcome: Outcome) -> None:
        assert outcome.loss is not None
        loss = float(self.accelerator.reduce(outcome.loss.detach().float(), reduction="mean"))
        assert self.gradient_norm is not None
        figures = {
            "loss": loss,
            "learning_rate": float(self.schedule.get_last_lr()[0]),
            "gradient_norm": float(self.gradient_norm),
        }
        if not self.is_plain:
            figures |= self.clipper.metrics()
        self.logger.log(self.state.step, figures)
        self.bad_losses = 0 if math.isfinite(loss) else self.bad_losses + 1
        if self.bad_losses >= PATIENCE:
            raise DivergedError(
                f"The loss was not finite {PATIENCE} times in a row, up to step "
                f"{self.state.step}. The last checkpoint in {self.logger.path} is from before. "
                "Try a lower learning rate, a longer warm-up, or max_grad_norm."
            )

    def _validate(self) -> None:
        self.figures = self._evaluate(self.data.validation, "validation_")
        self.logger.log(self.state.step, self.figures)
        value = self.figures[f"validation_{self.recipe.headline}"]
        best = self.state.best
        lower = self.recipe.lower_is_better
        if math.isfinite(value) and (best is None or (value < best if lower else value > best)):
            self.state = replace(self.state, best=value, best_step=self.state.step)
            self.checkpoints.write_best(self.model, self.state.step)

    def _test(self) -> None:
        """Evaluate on test data twice: with the last weights, and with the best ones."""
        found = self._evaluate(self.data.test, "test_")
        if self.state.best_step is not None:
            load_weights(self.model, self.checkpoints.best(self.state.best_step))
            found |= self._evaluate(self.data.test, "best_test_")
        self.figures |= found
        self.logger.log(self.state.step, found)

    def _evaluate(self, examples: Any, prefix: str) -> dict[str, float]:
        found = evaluate(
            self.accelerator,
            self.recipe,
            self.model,
            examples,
            self.share,
            self.training.workers,
        )
        return {prefix + name: value for name, value in found.items()}

    def _stop_requested(self) -> int:
        """Return the signal that any process has received; all of them learn of it together."""
        if self.share.world == 1:
            return self.requests.number
        if self.state.step % CHECK_STOP_EVERY and self.state.step < self.steps:
            return 0
        number = torch.tensor(self.requests.number, device=self.accelerator.device)
        return int(self.accelerator.gather(number[None]).max())

    def _facts(self) -> dict[str, Any]:
        trained = [p.numel() for p in self.model.parameters() if p.requires_grad]
        return {
            "training examples": len(self.data.training),
            "validation examples": len(self.data.validation),
            "test examples": len(self.data.test),
            "parameters": sum(trained),
            "processes": self.share.world,
            **self.data.facts,
        }

    def _check_data(self) -> None:
        for name in ("training", "validation", "test"):
            if not len(getattr(self.data, name)):
                raise ValueError(f"The recipe {self.recipe.name!r} has no {name} examples.")
        for name in ("ids", "domains"):
            labels = getattr(self.data, name)
            if labels is not None and len(labels) != len(self.data.training):
                raise ValueError(
                    f"The recipe {self.recipe.name!r} has {len(self.data.training)} training "
                    f"examples, but {len(labels)} {name}."
                )

    def _finished(self) -> Finished:
        figures = dict(self.figures)
        if self.state.best is not None:
            figures[f"best_validation_{self.recipe.headline}"] = self.state.best
        return Finished(self.logger.path, self.state.step, figures, self.state.best_step)
