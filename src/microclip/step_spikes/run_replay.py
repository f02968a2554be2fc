"""Running one recorded step again: its losses and gradient norms now, beside those on record.

The model is left as it is. What a ledger does not hold cannot be repeated: the weights before the
step (which the caller loads), random numbers, and what the data looked like then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from microclip.clipper import Clipper
from microclip.dataset_ids import ids_in
from microclip.draggers.source import LedgerLike, Source
from microclip.draggers.statistics import Values
from microclip.engines.gradients import LossFn, trainable
from microclip.engines.select import EngineName
from microclip.engines.snapshot import undisturbed
from microclip.microbatches import cut
from microclip.rules import Keep
from microclip.step_spikes.series import examples_of, shares

ROUNDING = 1e-4  # relative difference up to which numbers are called the same
SHOWN = 5  # rows of a printed result, and ids in a sentence


@dataclass(frozen=True, eq=False)
class Replay:
    """A step that was run again.

    Attributes:
        step: Its number.
        table: A pyarrow table with a row for every example, those with the largest shares of loss
            or gradient energy first: `recorded_loss` and `loss` of the example, `recorded_norm` and
            `norm` of the gradient of its micro-batch, `row_norm` of its own, `loss_share` and
            `energy_share` now. Null: not recorded, or not known.
        same: Whether everything on record came out again, up to rounding.
        exact: Whether it came out bit for bit.
        notes: What differs, and what cannot be known, in sentences.
    """

    step: int
    table: pa.Table
    same: bool
    exact: bool
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.table)

    def __str__(self) -> str:
        lines = [f"Step {self.step}, run again:"]
        for row in self.table.slice(0, SHOWN).to_pylist():
            parts = [f"loss {row['loss']:.4g} (recorded {_shown(row['recorded_loss'])})"]
            if row["norm"] is not None:
                kind = "" if row["norm"] == row["row_norm"] else "of its micro-batch "
                recorded = _shown(row["recorded_norm"])
                parts.append(f"gradient {kind}{row['norm']:.4g} (recorded {recorded})")
            if row["row_norm"] is not None and row["row_norm"] != row["norm"]:
                parts.append(f"gradient {row['row_norm']:.4g}")
            if row["energy_share"] is not None:
                parts.append(f"{row['energy_share']:.0%} of the gradient energy")
            lines.append(f"  {row['id']}: {', '.join(parts)}")
        return "\n".join([*lines, *self.notes])


def replay(
    ledger: LedgerLike,
    step: int,
    model: nn.Module,
    loss_fn: LossFn,
    dataset: Any,
    *,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    engine: EngineName = "auto",
) -> Replay:
    """Run a recorded step again, and compare its losses and gradient norms with those on record.

    >>> found = replay("runs/first", 412, model, loss_fn, dataset)  # doctest: +SKIP
    >>> print(found)  # doctest: +SKIP

    Args:
        ledger: The folder of a ledger, a `microclip.Ledger`, or the result of `open_ledger`.
        step: The number of the step.
        model: The model in the state before that step: load a checkpoint first. It is run in its
            current mode (`train()` or `eval()`), and left as it is.
        loss_fn: As in training; must return one loss per example.
        dataset: Where the examples are: a data set whose positions are the ids, what
            `microclip.with_ids` returned or a torch `Subset` of it, a mapping, or a function that
            returns the sample of an id.
        collate_fn: Makes a batch of samples, like that of the training's data loader.
        engine: As in `Clipper`; with that of the recorded run, norms are the same bit for bit.
    """
    if isinstance(step, bool) or not isinstance(step, int):
        raise ValueError(f"step must be the number of a recorded step, but got {step!r}.")
    source = Source.open(ledger)
    recorded = examples_of(source, np.array([step])).get(step)
    if recorded is None:
        raise ValueError(f"The ledger {source.path} has no step {step}: {_known_steps(source)}.")
    if source.has_example_weights:  # these are norms of weighted gradients
        recorded["norms"] = np.full(len(recorded["norms"]), np.nan)
    parameters = trainable(model)
    runner = _Runner(model, loss_fn, engine, next(iter(parameters.values())).device)
    find = _finder(dataset)
    ids = recorded["id"].to_pylist()
    parts = []
    with undisturbed(model, parameters), torch.enable_grad():
        for rank in np.unique(recorded["ranks"]).tolist():
            mine = np.flatnonzero(recorded["ranks"] == rank)
            rows = np.flatnonzero(np.isin(recorded["of"], mine))
            batch = collate_fn([find(ids[row]) for row in rows])
            parts.append(runner.run(batch, recorded["sizes"][mine].tolist(), _of(recorded, rows)))
    return _result(step, recorded, parts, _blind_spots(source, recorded, model))


@dataclass(frozen=True)
class _Part:
    """What a rank's rows give now."""

    losses: Values  # of rows
    norms: Values  # of micro-batches
    row_norms: Values | None


@dataclass
class _Runner:
    model: nn.Module
    loss_fn: LossFn
    engine: EngineName
    device: torch.device

    def run(self, batch: Any, sizes: list[int], recorded: Values | None) -> _Part:
        """Run the rows of a rank: as one batch, as recorded, and one by one."""
        batch = tree_map(lambda x: x.to(self.device) if isinstance(x, Tensor) else x, batch)
        with torch.no_grad():
            losses = self.loss_fn(batch)
        count = sum(sizes)
        if not isinstance(losses, Tensor) or losses.shape != (count,):
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(
                f"loss_fn must return one loss for each of the {count} rows of the step, as with "
                f'reduction="none", but returned {shape}.'
            )
        norms, others = self._norms(batch, sizes)
        found = losses.double().cpu().numpy()
        if recorded is not None and _distance(others, recorded) < _distance(found, recorded):
            found = others  # it was computed micro-batch by micro-batch then, too
        mixes = any(isinstance(m, _BatchNorm) and m.training for m in self.model.modules())
        if max(sizes) == 1:
            return _Part(found, norms, norms)
        return _Part(found, norms, None if mixes else self._norms(batch, [1] * count)[0])

    def _norms(self, batch: Any, sizes: list[int]) -> tuple[Values, Values]:
        """Return the norms of these micro-batches, and the losses of their rows."""
        size = max(sizes)
        if sizes == [len(each.ids) for each in cut(batch, size)]:
            clipper = Clipper(self.model, size, rule=Keep(), engine=self.engine, verify="never")
            outcome = clipper.backward(self.loss_fn, batch)
        else:
            clipper = Clipper(self.model, rule=Keep())
            rows = cut(batch, 1)
            for stop, count in zip(np.cumsum(sizes).tolist(), sizes, strict=True):
                clipper.fold(self.loss_fn, rows[stop - count : stop].whole)
            outcome = clipper.finish()
        assert outcome.example_losses is not None
        found = outcome.norms, outcome.example_losses
        norms, losses = (each.double().cpu().numpy() for each in found)
        return norms, losses


def _result(step: int, recorded: dict[str, Any], parts: list[_Part], notes: list[str]) -> Replay:
    of, ids = recorded["of"], recorded["id"]
    losses = np.concatenate([part.losses for part in parts])
    norms = np.concatenate([part.norms for part in parts])
    alone = None
    if all(part.row_norms is not None for part in parts):
        alone = np.concatenate([part.row_norms for part in parts if part.row_norms is not None])
    known = {"losses": recorded["losses"], "norms": recorded["norms"]}
    if np.isnan(known["norms"]).all() and np.isfinite(norms).any():
        known["norms"] = None
    loss_share = shares(losses)
    energies = np.square(norms)[of] if alone is None else np.square(alone)
    energy_share = shares(energies / max(float(np.nanmax(energies, initial=0.0)), 1e-300))
    wrong_losses = _different(losses, known["losses"])
    wrong_norms = _different(norms, known["norms"])
    table = pa.table(
        {
            "id": ids,
            "recorded_loss": _column(known["losses"], losses),
            "loss": pa.array(losses),
            "recorded_norm": _column(
                None if known["norms"] is None else known["norms"][of], losses
            ),
            "norm": pa.array(norms[of]),
            "row_norm": _column(alone, losses),
            "loss_share": pa.array(loss_share),
            "energy_share": pa.array(energy_share),
        }
    )
    order = np.lexsort((np.arange(len(of)), -np.fmax(loss_share, energy_share)))
    sentences = _sentences(step, ids.to_pylist(), wrong_losses, wrong_norms, known)
    exact = _equal(losses, known["losses"]) and _equal(norms, known["norms"])
    return Replay(
        step=step,
        table=table.take(pa.array(order)),
        same=not len(wrong_losses) and not len(wrong_norms),
        exact=exact,
        notes=(*sentences, *notes),
    )


def _sentences(
    step: int,
    ids: list[Any],
    losses: Sequence[int],
    norms: Sequence[int],
    known: dict[str, Values | None],
) -> list[str]:
    """Say what differs."""
    if known["losses"] is None and known["norms"] is None:
        return []
    count = len(ids)
    if not len(losses) and not len(norms):
        return ["Everything on record came out again, up to rounding."]
    if len(losses) > count / 2:
        return [
            f"{len(losses)} of {count} losses differ: the model is not in the state that it was in "
            f"before step {step}, or loss_fn, the data or the mode (train, eval) are not the same. "
            "Load the last checkpoint before the step."
        ]
    if len(losses) == 1:
        return [
            f"Only 1 of {count} losses differs, that of {ids[losses[0]]!r}: the data of this row "
            "is not what it was (augmentation, an edited file), or it depends on random numbers."
        ]
    if len(losses):
        names = ", ".join(repr(ids[row]) for row in losses[:SHOWN])
        more = ", ..." if len(losses) > SHOWN else ""
        return [
            f"Only {len(losses)} of {count} losses differ, those of {names}{more}: the data of "
            "these rows is not what it was (augmentation, an edited file), or they depend on "
            "random numbers."
        ]
    return [
        f"All losses on record came out again, but {_counted(norms)}: other parameters are "
        "trainable now, or loss_fn differentiates something else."
    ]


def _counted(norms: Sequence[int]) -> str:
    return "1 norm differs" if len(norms) == 1 else f"{len(norms)} norms differ"


def _blind_spots(source: Source, recorded: dict[str, Any], model: nn.Module) -> list[str]:
    """Say what cannot be compared or repeated."""
    notes = []
    if recorded["losses"] is None:
        notes.append("The losses of single examples were not recorded, so they are not compared.")
    if np.isnan(recorded["norms"]).all():
        why = "were not recorded"
        if source.has_example_weights:
            why = "on record are those of weighted gradients"
        notes.append(f"Norms {why}, so those shown are not compared with anything.")
    if any(isinstance(m, _DropoutNd) and m.training and m.p > 0 for m in model.modules()):
        notes.append(
            "The model has dropout, whose masks are not on record: losses and norms are those of "
            "other masks. model.eval() turns it off."
        )
    if any(isinstance(m, _BatchNorm) and m.training for m in model.modules()):
        notes.append("BatchNorm mixes the rows of a batch, so rows have no norms of their own.")
    if len(np.unique(recorded["ranks"])) > 1 and any(
        isinstance(m, nn.SyncBatchNorm) for m in model.modules()
    ):
        notes.append("SyncBatchNorm saw the rows of all ranks then; now it sees one rank's.")
    return notes


def _finder(dataset: Any) -> Callable[[Any], Any]:
    """Return a function from an id to its sample."""
    names = ids_in(dataset, "a function that returns the sample of an id")
    if names is not None and not isinstance(names, range):
        places: dict[Hashable, int] = {str(name): place for place, name in enumerate(names)}

        def look_up(name: Any) -> Any:
            return dataset[places[str(name)]]
    elif hasattr(dataset, "__getitem__"):
        look_up = dataset.__getitem__
    elif callable(dataset):
        look_up = dataset
    else:
        raise TypeError(
            "dataset must be a data set with positions, a mapping from ids to samples, or a "
            f"function that returns the sample of an id, but got {type(dataset).__name__}."
        )

    def find(name: Any) -> Any:
        try:
            return look_up(name)
        except (LookupError, TypeError) as error:
            kind = "mapping" if isinstance(dataset, Mapping) else type(dataset).__name__
            raise ValueError(
                f"The {kind} has no example {name!r}, which the ledger names. Pass the data set "
                "that was trained on, or a function that returns the sample of an id."
            ) from error

    return find


def _of(recorded: dict[str, Any], rows: Any) -> Values | None:
    losses: Values | None = recorded["losses"]
    return None if losses is None else losses[rows]


def _distance(values: Values, recorded: Values) -> float:
    return float(np.nansum(np.abs(values.astype(np.float32) - recorded.astype(np.float32))))


def _different(values: Values, recorded: Values | None) -> list[int]:
    """Return where values differ from those on record by more than rounding."""
    if recorded is None:
        return []
    same = np.isclose(values, recorded, rtol=ROUNDING, atol=1e-6, equal_nan=True)
    return [int(place) for place in np.flatnonzero(~same)]


def _equal(values: Values, recorded: Values | None) -> bool:
    """Whether values are those on record; losses are recorded in single precision."""
    if recorded is None:
        return True
    single = np.array_equal(values.astype(np.float32), recorded.astype(np.float32), equal_nan=True)
    return single or np.array_equal(values, recorded, equal_nan=True)


def _column(values: Values | None, like: Values) -> pa.Array:
    return pa.nulls(len(like), pa.float64()) if values is None else pa.array(values)


def _shown(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.4g}"


def _known_steps(source: Source) -> str:
    found = source.steps
    return f"it has steps from {found.start} to {found.stop - 1}, perhaps not all of them"
