"""The contributions that a backward pass delivered for a chunk of micro-batches.

Norms are taken as soon as a parameter is complete; gradients are added up once the rule decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from microclip import multitensor
from microclip.engines.base import CannotFuseError
from microclip.engines.gradients import Gradients, add_multiple, gradient_hooks, set_aside
from microclip.engines.single_pass.contributions import (
    Contribution,
    Materialized,
    Shares,
    SmallParameters,
)
from microclip.engines.single_pass.memory import MemoryMeter
from microclip.engines.single_pass.recorder import Recorder
from microclip.engines.single_pass.rows import merged, squared_norms, sum_of
from microclip.engines.single_pass.verify import Comparison

# Norms come from products of up to four float32 numbers. Between these limits they are right.
SMALLEST, LARGEST = 1e-10, 1e16


class ChunkContributions:
    """Collects the contributions to all parameters; norms are taken as soon as possible."""

    def __init__(self, recorder: Recorder, meter: MemoryMeter | None) -> None:
        self._meter = meter
        self.groups = recorder.groups
        self.device = recorder.anchor.device
        self._expected = recorder.expected
        self._derived = recorder.derived.names
        self._parameters = recorder.parameters
        self._of: dict[str, list[Contribution]] = {}
        self._small: dict[str, Materialized] = {}  # the only contributions to small parameters
        self._joined: SmallParameters | None = None
        self._squares: dict[str, Tensor] = {}
        self._has_late_segments = False
        self.to_materialize: set[str] = set()  # parameters whose gradients to materialize
        recorder.on_contribution = self.add

    def add(self, name: str, contribution: Contribution) -> None:
        """Add a contribution; with a parameter's last one, take its norms.

        Called from within the backward pass, so autograd records none of this.
        """
        contributions = self._of.setdefault(name, [])
        last = len(contributions) + 1 == self._expected[name] and name not in self._derived
        if name in self.to_materialize:
            contribution = contribution.materialized(self.groups)
        contribution = contribution.kept(self.groups)
        contributions.append(contribution)
        if self._meter:
            self._meter.keep(contribution.nbytes)
        if last:
            self._take_norms(name, contributions)
        else:  # a segment that is recorded late may find more uses of a parameter that was complete
            self._squares.pop(name, None)
            self._small.pop(name, None)

    def _take_norms(self, name: str, contributions: list[Contribution]) -> None:
        """Take the norms of a parameter that is complete; small parameters are done together."""
        self._small.pop(name, None)
        only = contributions[0] if len(contributions) == 1 else None
        if isinstance(only, Materialized) and SmallParameters.takes(only, self.device):
            self._small[name] = only
        else:
            contributions[:] = merged(contributions)
            self._squares[name] = squared_norms(contributions, self.groups)

    @torch.no_grad()
    def complete(self, recorder: Recorder) -> None:
        """Follow derived tensors back to their parameters, and take the norms that are missing."""
        self._has_late_segments = recorder.has_late_segments
        for name in recorder.complete(self._of):
            self._squares.pop(name, None)
            self._small.pop(name, None)
        for name, contributions in self._of.items():
            if name not in self._squares and name not in self._small:
                self._take_norms(name, contributions)
        if self._small:
            self._joined = SmallParameters(self._small)
            self._squares["small ones"] = self._joined.squared_norms(self.groups)
            self._of = {name: each for name, each in self._of.items() if name not in self._small}
        if not self._squares:
            raise CannotFuseError(
                "The single-pass engine saw no parameter that affects the losses."
            )

    @torch.no_grad()
    def norms(self) -> Tensor:
        """Return the norm of every micro-batch's gradient over all parameters."""
        found = [_on(self.device, squares) for squares in self._squares.values()]
        wide = multitensor.widest(self.device)
        total = found[0].to(wide) if len(found) == 1 else torch.stack(found).sum(0, dtype=wide)
        norms = total.clamp(min=0).sqrt()
        return self._with_exact_extremes(norms) if multitensor.on_host(norms) else norms

    def _with_exact_extremes(self, norms: Tensor) -> Tensor:
        """Recompute norms that are so small or large that squares may have lost them."""
        doubtful = [j for j, n in enumerate(norms.tolist()) if not SMALLEST < n < LARGEST]
        if not doubtful:
            return norms
        if any(norms[j] == 0 for j in doubtful):  # most likely they really are
            parts = [one.nonzero(self.groups) for each in self._of.values() for one in each]
            parts += [self._joined.nonzero(self.groups)] if self._joined else []
            nonzero = torch.stack([_on(self.device, part) for part in parts]).any(0).tolist()
            doubtful = [j for j in doubtful if nonzero[j]]
        for j in doubtful:
            gradients = list(self._gradients_of(j).values())
            norms[j] = multitensor.join(
                [multitensor.norm([each], each.device) for each in gradients], self.device
            )
        return norms

    def _gradients_of(self, microbatch: int) -> Gradients:
        """Return one micro-batch's gradients; complex ones as pairs of real numbers."""
        found = {} if self._joined is None else self._joined.gradients_of(microbatch)
        for name in self._of:
            gradient = self._gradient(name, microbatch)
            found[name] = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        return found

    def _gradient(self, name: str, microbatch: int) -> Tensor:
        shape = self._parameters[name].shape
        parts = [each.gradient_of(self.groups, microbatch) for each in self._of[name]]
        return sum_of([part.reshape(shape) for part in parts])

    @contextmanager
    def compared(
        self, microbatch: int, parameters: dict[str, nn.Parameter]
    ) -> Iterator[Comparison]:
        """Compare a micro-batch's gradients with those of a backward pass inside the block.

        Each gradient is dropped as soon as it has been compared, so that a check takes no memory;
        not if reentrant checkpoints add to it several times.
        """
        comparison = Comparison()
        small = {} if self._joined is None else self._joined.gradients_of(microbatch)

        def mine(name: str) -> Tensor | None:
            return self._gradient(name, microbatch) if name in self._of else small.get(name)

        def compare(name: str) -> Callable[[nn.Parameter], None]:
            def hook(parameter: nn.Parameter) -> None:
                comparison.add(name, mine(name), parameter.grad)
                parameter.grad = None

            return hook

        late = self._has_late_segments
        with gradient_hooks({} if late else parameters, compare), set_aside(parameters):
            yield comparison
            if late:
                for name, parameter in parameters.items():
                    if parameter.grad is not None:
                        comparison.add(name, mine(name), parameter.grad)
        for name in (*small, *self._of):
            if name not in comparison:
                comparison.add(name, mine(name), None)

    def leave_out(self, left_out: Tensor) -> None:
        """Blank the micro-batches that are left out."""
        shares = self.groups.shares(left_out)
        for name, contributions in self._of.items():
            self._of[name] = [each.without(shares) for each in contributions]
        if self._joined:
            self._joined.leave_out(shares)

    def add_to(
        self,
        total: Gradients,
        coefficients: Tensor,
        parameters: dict[str, nn.Parameter],
        last: bool,
    ) -> None:
        """Add sum_j coefficient_j g_j; complex gradients as pairs of real numbers.

        The last time, a parameter's contributions are freed as soon as their sum is known, so that
        the sums can take their place.
        """
        if multitensor.on_host(coefficients) and any(
            map(multitensor.is_extreme, coefficients.tolist())
        ):
            for microbatch, coefficient in enumerate(coefficients):
                add_multiple(total, self._gradients_of(microbatch), coefficient, keeps=False)
            return
        shares = self.groups.shares(coefficients)
        if self._joined:
            self._joined.add_to(total, shares)
        for name in reversed(list(self._of)):  # the latest ones may still be in the cache
            contributions = self._of.pop(name) if last else self._of[name]
            total[name] = self._added(total.get(name), contributions, shares, parameters[name])

    def _added(
        self,
        found: Tensor | None,
        contributions: list[Contribution],
        shares: Shares,
        parameter: nn.Parameter,
    ) -> Tensor:
        """Return a parameter's total with these contributions added."""
        if found is not None and parameter.is_complex():
            found = torch.view_as_complex(found)
        for contribution in contributions:
            so_far = None if found is None else found.view(contribution.shape)
            found = contribution.add_to(so_far, shares)
        assert found is not None
        if found.shape != parameter.shape:
            found = found.view(parameter.shape)
        return torch.view_as_real(found) if found.is_complex() else found


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor if tensor.device == device else tensor.to(device)
