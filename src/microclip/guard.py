"""The domain guard: does clipping hold a whole domain back?

Clipping gives long gradients less weight. If one domain (a task, a language, a source) has longer
gradients than the others, it loses part of its share in every step, although nothing is wrong with
it. Rules that weight examples may do the same to a domain that is hard to learn. From a ledger, the
guard tells which domain, by how much, and since when.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

try:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
except ImportError as error:
    raise ImportError(
        f"microclip.guard needs {error.name}: pip install 'microclip[ledger]'"
    ) from error

from microclip.draggers.source import (
    PLACE,
    IdIndex,
    LedgerLike,
    Source,
    WeightReader,
    column,
    members,
    whole_steps,
)
from microclip.draggers.statistics import LIMIT, LITTLE, Numbers, Values, log_norms
from microclip.user_warnings import warn

BINS = 10  # stretches of training in the table over time
BLOCKS = 6 * BINS  # of consecutive steps, which the bootstrap resamples
DRAWS = 2000
CELLS = 700  # of the histograms that quantiles are read from, 0.02 wide each
COLUMNS = ("step", "ids", "size", "norm", "weight", "domain", "skipped")

DomainOf = Mapping[Any, Hashable] | Callable[[Any], Hashable]


class DomainWarning(UserWarning):
    """Clipping systematically holds a domain back."""


@dataclass(frozen=True)
class Finding:
    """A domain that is held back."""

    domain: str
    ratio: float  # its share of the weight divided by its share of the examples
    low: float
    high: float
    steps: int  # in which other domains were present too
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, eq=False)
class Report:
    """What the guard found.

    Attributes:
        domains: A table with a row per domain, the one held back most first: examples (counting
            every appearance), example_share, weight_share, ratio with low and high, steps,
            suppression, and quantiles of log(norm / median norm of the step). For rules that
            weight examples, also held_back: in which share of their appearances its examples had
            less than half their weight.
        over_time: The same for each tenth of training, without intervals.
        findings: The domains that are held back, the worst first.
    """

    domains: pa.Table
    over_time: pa.Table
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        if self.findings:
            return "\n".join(map(str, self.findings))
        return f"None of the {len(self.domains)} domains is held back."


def check(
    ledger: LedgerLike,
    domain_of: DomainOf | None = None,
    *,
    below: float = 0.8,
    min_steps: int = 100,
) -> Report:
    """Compare every domain's share of the weight with its share of the examples.

    Only steps with examples of at least two domains count: in others there is nothing to compare.
    A domain gets a warning if the whole 95 % interval of its ratio lies below `below`, after at
    least `min_steps` steps. Intervals come from a bootstrap over blocks of consecutive steps,
    because steps close to each other are alike.

    Args:
        ledger: The folder of a ledger, a `microclip.Ledger`, or the result of `open_ledger`.
        domain_of: A mapping or function from an example's id to its domain, for runs that were
            trained without `domains=`.
        below: The ratio below which a domain counts as held back.
        min_steps: The number of steps needed to say so.
    """
    if not 0 < below <= 1:
        raise ValueError(f"below must be a ratio between 0 and 1, but got {below!r}.")
    source = Source.open(ledger)
    names = _DomainIndex(source, domain_of)
    weights = WeightReader(source) if source.has_example_weights else None
    sums = _Sums(source, is_weighted=weights is not None)
    for table in whole_steps(source.microbatches, (*COLUMNS, *PLACE) if weights else COLUMNS):
        sums.add(table, names, weights)
    report = _report(sums, names, below, min_steps, clipped_by_domain=domain_of is None)
    for finding in report.findings:
        warn(finding.message, DomainWarning)
    return report


class _DomainIndex:
    """Numbers the domains, and tells which rows or examples belong to which."""

    def __init__(self, source: Source, domain_of: DomainOf | None) -> None:
        self.source, self.domain_of = source, domain_of
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._ids = IdIndex(source.integers)
        self._of_example = np.zeros(0, dtype=np.int64)

    def entries(self, table: pa.Table, by_example: bool) -> tuple[Numbers, Numbers, Numbers]:
        """Return row, domain and number of examples for every domain in every row.

        With `by_example`, or if only examples have domains, each example is an entry of its own.
        """
        if self.domain_of is None and not by_example:
            rows = np.arange(len(table))
            return rows, self._of_rows(table), table["size"].to_numpy().astype(np.int64)
        ids, sizes = members(table)
        rows = np.repeat(np.arange(len(table)), sizes)
        if self.domain_of is None:
            return rows, self._of_rows(table)[rows], np.ones(len(rows), dtype=np.int64)
        examples = self._ids.look_up(ids)
        new = self._ids.ids.slice(len(self._of_example)).to_pylist()
        numbers = np.array([self._number(self._domain(one)) for one in new], dtype=np.int64)
        self._of_example = np.concatenate([self._of_example, numbers])
        return rows, self._of_example[examples], np.ones(len(rows), dtype=np.int64)

    def _of_rows(self, table: pa.Table) -> Numbers:
        coded = column(table, "domain").dictionary_encode(null_encoding="encode")
        given = coded.dictionary.to_pylist()
        if given == [None] and not self.names:
            raise ValueError(
                f"The ledger {self.source.path} has no domains: it was trained without domains=. "
                "Pass check(ledger, domain_of=...), a mapping or a function from id to domain."
            )
        places = np.array([self._number(name) for name in given], dtype=np.int64)
        numbers: Numbers = places[coded.indices.to_numpy()]
        return numbers

    def _domain(self, one: Any) -> Hashable:
        assert self.domain_of is not None
        if callable(self.domain_of):
            return self.domain_of(one)
        try:
            return self.domain_of[one]
        except KeyError:
            raise ValueError(
                f"domain_of has no entry for the id {one!r}, which is in the ledger. Its ids are "
                f"{'integers' if self.source.integers else 'strings'}."
            ) from None

    def _number(self, name: Hashable) -> int:
        text = str(name)
        if text not in self._numbers:
            self._numbers[text] = len(self.names)
            self.names.append(text)
        return self._numbers[text]


class _Sums:
    """Sums by block of steps and domain; memory grows with the number of domains only."""

    def __init__(self, source: Source, is_weighted: bool) -> None:
        self.steps = source.steps
        self.is_weighted = is_weighted  # by example
        shape = (BLOCKS, 0)
        self.weight, self.example = np.zeros(shape), np.zeros(shape)  # shares, summed over steps
        self.suppression, self.count = np.zeros(shape), np.zeros(shape)
        self.held_back = np.zeros(shape)
        self.mixed = np.zeros(shape)  # steps with this domain and at least one other
        self.cells = np.zeros((BINS, 0, CELLS))

    def add(self, table: pa.Table, names: _DomainIndex, by_example: WeightReader | None) -> None:
        rows, domains, counts = names.entries(table, by_example is not None)
        total = len(names.names)
        self._grow(total)
        _, steps = np.unique(table["step"].to_numpy(), return_inverse=True)
        norms = log_norms(table["norm"].to_numpy(), steps)
        usable = ~table["skipped"].to_numpy()[rows]
        if by_example is None:
            weights = table["weight"].to_numpy()[rows]
            held = np.zeros(len(rows), dtype=bool)
            usable &= ~np.isnan(norms)[rows]
        else:  # norms do not matter: often, a step has only one
            of_rule, weights = by_example.read(table)
            held = of_rule < LITTLE
        usable &= np.isfinite(weights)
        usable[usable] = _mixed(steps[rows[usable]], domains[usable], (counts * weights)[usable])
        rows, domains, counts, weights, held = (
            each[usable] for each in (rows, domains, counts, weights, held)
        )
        if not len(rows):
            return
        step, given = steps[rows], counts * weights
        highest = np.zeros(int(steps.max()) + 1)
        np.maximum.at(highest, step, weights)
        ago = table["step"].to_numpy()[rows] - self.steps.start
        place = ago * BLOCKS // len(self.steps) * total + domains

        def summed(values: Values) -> Values:
            found = np.bincount(place, values, BLOCKS * total).reshape(BLOCKS, total)
            return found.astype(np.float64, copy=False)

        self.weight += summed(given / np.bincount(step, given)[step])
        self.example += summed(counts / np.bincount(step, counts)[step])
        self.suppression += summed(counts * (1 - weights / highest[step]))
        self.held_back += summed(counts * held)
        self.count += summed(counts.astype(np.float64))
        _, first = np.unique(step * total + domains, return_index=True)
        self.mixed += np.bincount(place[first], minlength=BLOCKS * total).reshape(BLOCKS, total)
        time = ago * BINS // len(self.steps)
        known = ~np.isnan(norms[rows])
        cell = ((norms[rows][known] + LIMIT) / (2 * LIMIT) * CELLS).astype(np.int64)
        flat = (time * total + domains)[known] * CELLS + cell.clip(0, CELLS - 1)
        cells = np.bincount(flat, counts[known], BINS * total * CELLS)
        self.cells += cells.reshape(BINS, total, CELLS)

    def _grow(self, total: int) -> None:
        more = total - self.weight.shape[1]
        for name in ("weight", "example", "suppression", "held_back", "count", "mixed"):
            setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, more))))
        self.cells = np.pad(self.cells, ((0, 0), (0, more), (0, 0)))


def _mixed(steps: Numbers, domains: Numbers, given: Values) -> npt.NDArray[np.bool_]:
    """Return which entries belong to steps with at least two domains and some weight."""
    count = int(domains.max(initial=0)) + 1
    pairs = np.unique(steps * count + domains)
    length = int(steps.max(initial=0)) + 1
    several = np.bincount(pairs // count, minlength=length) > 1
    found: npt.NDArray[np.bool_] = (several & (np.bincount(steps, given, length) > 0))[steps]
    return found


def _report(
    sums: _Sums, names: _DomainIndex, below: float, min_steps: int, clipped_by_domain: bool
) -> Report:
    low, high = _bootstrap(sums)
    columns = _columns(sums, slice(None))
    steps = sums.mixed.sum(0).astype(np.int64)
    table = pa.table(
        {
            "domain": pa.array(names.names, pa.string()),
            **columns,
            "low": _array(low),
            "high": _array(high),
            "steps": steps,
        }
    ).sort_by([("ratio", "ascending"), ("domain", "ascending")])
    find = _finding_by_example if sums.is_weighted else _finding
    findings = tuple(
        find(row, clipped_by_domain)
        for row in table.to_pylist()
        if row["high"] is not None and row["high"] < below and row["steps"] >= min_steps
    )
    return Report(table, _over_time(sums, names), findings)


def _over_time(sums: _Sums, names: _DomainIndex) -> pa.Table:
    each = BLOCKS // BINS
    start, length = sums.steps.start, len(sums.steps)
    tables = []
    for time in range(BINS):
        first, last = (start - (-length * t // BINS) for t in (time, time + 1))
        total = len(names.names)
        tables.append(
            pa.table(
                {
                    "time": np.full(total, time),
                    "first_step": np.full(total, first),
                    "last_step": np.full(total, last - 1),
                    "domain": pa.array(names.names, pa.string()),
                    **_columns(sums, slice(time * each, (time + 1) * each), time),
                }
            )
        )
    return pa.concat_tables(tables)


def _columns(sums: _Sums, blocks: slice, time: int | None = None) -> dict[str, Any]:
    weight, example = sums.weight[blocks].sum(0), sums.example[blocks].sum(0)
    count = sums.count[blocks].sum(0)
    cells = sums.cells.sum(0) if time is None else sums.cells[time]
    held = {"held_back": _array(_divide(sums.held_back[blocks].sum(0), count))}
    quantiles = {f"log_norm_{int(100 * q)}": _array(_quantile(cells, q)) for q in (0.1, 0.5, 0.9)}
    return {
        "examples": count.astype(np.int64),
        "example_share": _array(_divide(example, example.sum())),
        "weight_share": _array(_divide(weight, weight.sum())),
        "ratio": _array(_divide(weight, example)),
        "suppression": _array(_divide(sums.suppression[blocks].sum(0), count)),
        **(held if sums.is_weighted else {}),
        **quantiles,
    }


def _bootstrap(sums: _Sums) -> tuple[Values, Values]:
    """Return 95 % intervals of the ratios by resampling blocks of steps."""
    there = sums.example.sum(1) > 0
    weight, example = sums.weight[there], sums.example[there]
    nothing = np.full(weight.shape[1], np.nan)
    if len(weight) < 2:
        return nothing, nothing
    draw = np.random.default_rng(0)  # the same ledger, the same answer
    times = draw.multinomial(len(weight), np.full(len(weight), 1 / len(weight)), DRAWS)
    ratios = _divide(times @ weight, times @ example)
    known = ~np.isnan(ratios).any(0)
    low, high = nothing.copy(), nothing.copy()
    low[known], high[known] = np.quantile(ratios[:, known], (0.025, 0.975), axis=0)
    return low, high


def _finding_by_example(row: dict[str, Any], has_domains: bool) -> Finding:
    remedy = (
        "The rule knows the domains (domains=), so look at the examples that it holds back: they "
        "may well be wrong."
        if has_domains
        else "If nothing is wrong with it, pass domains= to Clipper.backward(): LossHistory judges "
        "a domain by its own losses if most of it would be held back."
    )
    message = (
        f"The rule holds the domain {row['domain'][:100]!r} back: {_shares(row)}. Its examples had "
        f"less than half their weight in {100 * row['held_back']:.0f} % of their appearances. "
        f"{remedy}"
    )
    return Finding(row["domain"], row["ratio"], row["low"], row["high"], row["steps"], message)


def _shares(row: dict[str, Any]) -> str:
    return (
        f"it has {100 * row['example_share']:.1f} % of the examples and "
        f"{100 * row['weight_share']:.1f} % of the weight, {row['ratio']:.2f} times its share "
        f"(95 % interval {row['low']:.2f} to {row['high']:.2f}, {row['steps']} steps)"
    )


def _finding(row: dict[str, Any], clipped_by_domain: bool) -> Finding:
    remedy = (
        "It already has its own bound (domains=), so its norms vary more than those of other "
        "domains: a larger microbatch_size evens them out."
        if clipped_by_domain
        else "Remedy: pass domains= to Clipper.backward(), so that each domain has its own bound."
    )
    message = (
        f"Clipping holds the domain {row['domain'][:100]!r} back: {_shares(row)}. Half of its "
        f"gradients are longer than {np.exp(row['log_norm_50']):.2g} times the median norm of "
        f"their step. {remedy}"
    )
    return Finding(row["domain"], row["ratio"], row["low"], row["high"], row["steps"], message)


def _quantile(cells: Values, q: float) -> Values:
    """Return the center of the cell that holds the q-quantile of the examples."""
    total = cells.sum(1)
    reached = cells.cumsum(1) >= q * total[:, None]
    middle = (reached.argmax(1) + 0.5) / CELLS * 2 * LIMIT - LIMIT
    found: Values = np.where(total > 0, middle, np.nan)
    return found


def _divide(above: Values, under: Any) -> Values:
    under = np.broadcast_to(under, above.shape)
    result = np.full(above.shape, np.nan)
    np.divide(above, under, out=result, where=under > 0)
    return result


def _array(values: Values) -> pa.Array:
    return pa.array(values, from_pandas=True)
