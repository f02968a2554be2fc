"""Rules that remember every example, and hold back those whose loss stays high.

Each example has a moving average of its losses (or of its gradient norms), over its visits. Once
training has learned most examples, the averages fall into two groups, and an example's weight is
the probability that it belongs to the lower one.

High losses may belong to hard examples, too. So holding back starts as a *trial*: examples that
are right get better even while they are left out, because the others teach what they need; wrong
ones do not. If the suspects get better, all are released: for good, or, if most examples were not
learned yet, until they are.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor

from microclip.rules.example_table import ExampleTable
from microclip.rules.examples import ExampleRule, Seen
from microclip.rules.mixture import Mixture
from microclip.rules.norms import Rule, is_number

# Chosen on development seeds of the dirty-data benchmark, and then left alone.
MEMORY = 0.9  # the largest share of the past in an average
EARLIEST, LATEST = 0.1, 0.3  # when the trial starts, as a share of training:
LEARNED = 0.35  # as soon as the median loss is below this share of the upper group's,
BEGUN = 0.8  # at the latest once it is below this one; then there may be a second trial,
LAST_START = 0.7  # not later than this
TRIAL = 0.1  # the length of the trial, as a share of training
TRIAL_VISITS = 2  # and its least length, in visits of every example
VISITS = 3  # an example that was seen less often is not held back
UNLEARNED = 0.8  # suspects are released if their loss is below this share of an untrained model's,
IMPROVED = 0.95  # provided that it has fallen to this share while they were left out
FEW_VISITS = 8  # below this, training is too short to tell
UNTOLD = 10  # visits after which the trial starts if nobody said how long training takes
SMALL = 20  # examples of a domain, below which none of them is held back
APART = 4.0  # separation of the groups within a domain, below which none of it is held back

COLUMNS = {
    "average": torch.float32,  # of losses or norms
    "before": torch.float32,  # the last loss while it was not held back
    "last": torch.float32,  # loss
    "domain": torch.int16,
    "held": torch.bool,  # whether it was held back at its last visit
}
STATE = {
    "kind", "phase", "mixtures", "domains", "steps", "visits", "checked", "trial_start", "trials",
    "was_learned", "first_loss", "table", "clip",
}  # fmt: skip

Phase = Literal["watching", "trial", "holding", "released", "off"]

LARGEST = torch.finfo(torch.float32).max

logger = logging.getLogger("microclip")


class LossHistory(ExampleRule):
    """Holds back examples whose loss stays high while the others are learned.

    For training that visits every example about ten times or more, on data with wrong labels,
    garbage or outliers. Needs ids, and one loss per example. On clean data it ends its trial and
    then does nothing.

    Args:
        total_steps: How many steps training will have; the integrations know it.
        clip: A rule for norms, such as `Unit()`, which helps in regression with
            outliers.
        most: Warn if more than this share of all examples is held back.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        clip: Rule | None = None,
        most: float = 0.5,
    ) -> None:
        super().__init__(clip=clip, total_steps=total_steps)
        if not is_number(most) or not 0 < most <= 1:
            raise ValueError(f"most must be a share between 0 and 1, but got {most!r}.")
        self.most = float(most)
        self.table = ExampleTable(**COLUMNS)
        self.phase: Phase = "watching"
        self.mixtures: dict[int, Mixture | None] = {}  # by number of the domain; -1: of all
        self._domains: dict[int, int] = {0: 0}  # numbers of domains by key
        self._steps = 0
        self._visits = 0  # of all examples
        self._checked = 0  # visits at the last look
        self._trial_start = 0
        self._trials = 0  # so far
        self._was_learned = False  # whether most examples were learned when the trial started
        self._first_loss = math.nan  # the mean of the first step
        self._messages: list[str | Warning] = []
        self._warned = False

    def _settings(self) -> dict[str, Any]:
        most = None if self.most == 0.5 else self.most
        return {"total_steps": self.total_steps, "clip": self.clip, "most": most}

    @property
    def is_holding(self) -> bool:
        """Whether examples are held back now."""
        return self.phase in ("trial", "holding")

    def weigh(self, keys: Tensor, losses: Tensor | None) -> Tensor:
        """Return the probability that each example is right; 1 while nothing is known."""
        if not self.is_holding or not self.mixtures:
            return torch.ones(len(keys))
        rows = self.table.find(keys)
        found = self._weights(rows.clamp(min=0))
        found[(rows < 0)] = 1.0
        return found.float()

    def _weights(self, rows: Tensor) -> Tensor:
        """Return the weights of known examples."""
        averages = self.table["average"][rows]
        common = self.mixtures.get(-1)
        found = torch.ones(len(rows), dtype=torch.float64)
        if common is not None:
            found = common.weights(averages)
        domains = self.table["domain"][rows]
        if len(self.mixtures) > 1:
            exempt = torch.zeros(2**15, dtype=torch.bool)
            exempt[[n for n, mixture in self.mixtures.items() if n >= 0 and mixture is None]] = True
            found[exempt[domains.long()]] = 1.0
            for number, mixture in self.mixtures.items():
                if number >= 0 and mixture is not None:
                    here = domains == number
                    found[here] = mixture.weights(averages[here])
        found[self.table["visits"][rows] < VISITS] = 1.0
        return found

    def remember(self, seen: Seen) -> None:
        """Add the losses of a step to the record, and look at the whole of it once per epoch."""
        self._steps += 1
        values = self._values(seen)
        usable = seen.losses.isfinite() & values.isfinite()
        columns = [seen.keys, seen.losses, values, seen.weights.double(), seen.domains]
        if not bool(usable.all()):
            columns = [column[usable] for column in columns]
        keys, losses, values, weights, domains = _merged(*columns)
        if not len(keys):
            return
        if math.isnan(self._first_loss):
            self._first_loss = losses.mean().item()
        table = self.table
        rows = table.add(keys)
        visits = table["visits"][rows].double() - 1  # earlier ones
        # the first loss says nothing: nothing was learned when it was taken
        share = (1 - 1 / visits.clamp(min=1)).clamp(max=MEMORY)
        average = share * table["average"][rows].double() + (1 - share) * values
        losses = losses.clamp(-LARGEST, LARGEST)  # beyond float32
        table["average"][rows] = average.clamp(-LARGEST, LARGEST).float()
        table["last"][rows] = losses.float()
        held = weights < 0.5
        table["before"][rows] = torch.where(held, table["before"][rows], losses.float())
        table["held"][rows] = held
        table["domain"][rows] = self._numbers(domains)
        self._visits += len(keys)
        if self.phase == "watching" and self._visits == len(table) and self._is_half_over():
            self.phase = "off"
            self._warn(
                f"{type(self).__name__} holds nothing back: half of {self.total_steps} steps are "
                "over and no example has been seen twice. Use LossWeight() for data that is seen "
                "once, or check that ids stay the same from epoch to epoch."
            )
        if self._visits >= max(2 * len(table), self._checked + len(table)):
            self._checked = self._visits
            table.compact()  # all have been seen; new ones are rare from now on
            self._look()

    def _is_half_over(self) -> bool:
        return self.total_steps is not None and 2 * self._steps > self.total_steps

    def _values(self, seen: Seen) -> Tensor:
        """Return what is averaged over the visits of an example."""
        return seen.losses

    def _numbers(self, keys: Tensor) -> Tensor:
        """Return small numbers for domains."""
        if not bool(keys.any()):
            return torch.zeros(len(keys), dtype=torch.int16)
        numbers = [self._domains.setdefault(key, len(self._domains)) for key in keys.tolist()]
        return torch.tensor(numbers).clamp(max=2**15 - 1).to(torch.int16)

    def _look(self) -> None:
        """Decide whether to start, go on, or release; then fit the mixtures again."""
        if self.phase == "watching" and self._must_start():
            self.phase, self._trial_start = "trial", self._visits
            self._trials += 1
            self._fit()
            self._say(f"starts to hold examples back: {self._held_text()}, for a trial")
        elif self.is_holding:
            rows, weights = self._fit()
            if self.phase == "holding" or self._trial_is_over():
                self._judge(rows, weights)

    @property
    def _epochs(self) -> float | None:
        """How often training will visit an example, if it is known."""
        if self.total_steps is None:
            return None
        return self._visits / max(self._steps, 1) * self.total_steps / max(len(self.table), 1)

    def _must_start(self) -> bool:
        epochs, visits = self._epochs, self._visits / len(self.table)
        if epochs is not None and epochs < FEW_VISITS:
            self.phase = "off"
            self._warn(
                f"{type(self).__name__} holds nothing back: {self.total_steps} steps visit every "
                f"example about {epochs:.1f} times, and it takes {FEW_VISITS} or more to tell "
                "wrong examples from those not learned yet. Train longer, or use LossWeight()."
            )
            return False
        if visits < VISITS:
            return False
        done = visits / epochs if epochs is not None else visits / UNTOLD
        if done < EARLIEST:
            return False
        last, floor = self.table["last"][self.table.known()], self._floor()
        mixture = Mixture.fit(last)
        if mixture is None:
            return False
        level = (last.median().item() - floor) / (mixture.high - floor)
        if level < LEARNED:
            self._was_learned = True
            return self._trials == 0 or done < LAST_START
        late = done >= (LATEST if epochs is not None else 1)
        return late and level < BEGUN and self._trials == 0

    def _floor(self) -> float:
        """Return what losses are measured from: 0, or about the lowest if they are negative."""
        last = self.table["last"][self.table.known()]
        return min(0.0, last.kthvalue(1 + len(last) // 100).values.item())

    def _trial_is_over(self) -> bool:
        length = float(TRIAL_VISITS)
        if self._epochs is not None:
            length = max(length, TRIAL * self._epochs)
        return self._visits - self._trial_start >= length * len(self.table)

    def _fit(self) -> tuple[Tensor, Tensor]:
        """Fit the mixtures; return the rows of all examples and their weights."""
        table, rows = self.table, self.table.known()
        averages, domains = table["average"][rows], table["domain"][rows]
        self.mixtures = {-1: Mixture.fit(averages)}
        if len(self._domains) > 1:
            self._fit_domains(averages, domains, self._weights(rows))
        weights = self._weights(rows)
        share = (weights < 0.5).double().mean().item()
        if share > self.most:
            self._warn(
                f"{type(self).__name__} holds back {share:.0%} of all examples, more than "
                f"most={self.most:g}. If that many cannot be wrong, the others are not learned "
                "well enough: train longer or with a larger learning rate, or without this rule."
            )
        return rows, weights

    def _fit_domains(self, averages: Tensor, domains: Tensor, weights: Tensor) -> None:
        """Judge a domain that would be held back as a whole by its own averages instead."""
        counts = torch.bincount(domains.long(), minlength=len(self._domains))
        held = torch.bincount(domains.long(), weights, len(self._domains))
        for number in counts.nonzero().flatten().tolist():
            if counts[number] < SMALL:
                self.mixtures[number] = None
            elif held[number] < 0.5 * counts[number]:
                own = Mixture.fit(averages[domains == number])
                self.mixtures[number] = own if own and own.separation > APART else None

    def _judge(self, rows: Tensor, weights: Tensor) -> None:
        """Continue only while suspects that are left out stay as bad as they were."""
        table = self.table
        suspects = rows[(weights < 0.5) & table["held"][rows]]
        if not len(suspects):
            self._release("none of them is suspicious anymore")
            return
        last = table["last"][suspects].median().item()
        before = table["before"][suspects].median().item()
        floor = self._floor()
        change = f"left out, their median loss went from {before:.3g} to {last:.3g}"
        level = f"an untrained model's is {self._first_loss:.3g}"
        low = last - floor <= UNLEARNED * (self._first_loss - floor)
        if low and last - floor <= IMPROVED * (before - floor):
            self._release(f"{change}, and {level}, so they are hard, not wrong")
        elif self.phase == "trial":
            self.phase = "holding"
            self._say(
                f"keeps holding back {self._held_text()}: {change}, and {level}, so the others "
                "do not teach them"
            )

    def _release(self, reason: str) -> None:
        self.phase, self.mixtures = "released" if self._was_learned else "watching", {}
        until = "for good" if self._was_learned else "until more is learned"
        self._say(f"releases all examples, {until}: {reason}")

    def _held_text(self) -> str:
        held = int((self._weights(self.table.known()) < 0.5).sum())
        return f"{held} of {len(self.table)} examples"

    def _say(self, text: str) -> None:
        message = f"{type(self).__name__} {text} (step {self._steps})."
        logger.info(message)
        self._messages.append(message)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._messages.append(RuntimeWarning(text))

    def messages(self) -> list[str | Warning]:
        """Return what happened since the last call."""
        found, self._messages = self._messages, []
        return found

    def fingerprint(self) -> str:
        """Return a short text that differs if the record does."""
        sums = [self.table[c].double().sum().item() for c in ("average", "last", "visits")]
        return repr((self.phase, len(self.table), self._steps, self._visits, *sums))

    def state_dict(self) -> dict[str, Any]:
        """Return the whole record for a checkpoint: 16 bytes per example, and a few numbers."""
        return {
            "kind": type(self).__name__,
            "phase": self.phase,
            "mixtures": {n: m and asdict(m) for n, m in self.mixtures.items()},
            "domains": dict(self._domains),
            "steps": self._steps,
            "visits": self._visits,
            "checked": self._checked,
            "trial_start": self._trial_start,
            "trials": self._trials,
            "was_learned": self._was_learned,
            "first_loss": self._first_loss,
            "table": self.table.state_dict(),
            "clip": {} if self.clip is None else self.clip.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        missing = sorted(STATE - state.keys())
        if missing or state["kind"] != type(self).__name__:
            what = f"that of {state['kind']}" if "kind" in state else f"without {missing}"
            raise ValueError(
                f"{type(self).__name__} cannot use this state, which is {what}: the checkpoint was "
                "written with another rule, or is damaged."
            )
        table = ExampleTable(**COLUMNS)
        table.load_state_dict(state["table"])
        mixtures = state["mixtures"].items()
        self.mixtures = {int(n): None if m is None else Mixture(**m) for n, m in mixtures}
        self._domains = {int(key): number for key, number in state["domains"].items()}
        self.table = table
        self.phase = state["phase"]
        self._steps, self._visits = state["steps"], state["visits"]
        self._checked, self._trial_start = state["checked"], state["trial_start"]
        self._trials, self._was_learned = state["trials"], state["was_learned"]
        self._first_loss = state["first_loss"]
        if self.clip is not None:
            self.clip.load_state_dict(state["clip"])


class NormHistory(LossHistory):
    """Holds back examples whose gradient norm stays high; needs `microbatch_size=1`.

    Like `LossHistory`, with the norm of an example's gradient in place of its loss. It finds some
    kinds of wrong labels better, at the price of per-example norms.
    """

    needs_norms = True

    def __init__(self, total_steps: int | None = None, *, most: float = 0.5) -> None:
        super().__init__(total_steps, most=most)

    def _values(self, seen: Seen) -> Tensor:
        assert seen.norms is not None
        return seen.norms.double()


def _merged(keys: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
    """Return each key once, with the mean of what was seen of it."""
    unique, places = torch.unique(keys, return_inverse=True)
    if len(unique) == len(keys):
        return keys, *columns
    counts = torch.zeros(len(unique), dtype=torch.float64).index_add_(
        0, places, torch.ones(len(keys), dtype=torch.float64)
    )
    found = []
    for column in columns:
        if column.is_floating_point():
            total = torch.zeros(len(unique), dtype=torch.float64).index_add_(
                0, places, column.double()
            )
            found.append(total / counts)
        else:  # the domain: the same for all, or that of any
            found.append(torch.zeros_like(unique).scatter_reduce_(0, places, column, "amax"))
    return unique, *found
