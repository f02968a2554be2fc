"""`microclip theory` from start to finish: compute, print and plot."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from microclip_lab.theory.config import TheoryConfig
from microclip_lab.theory.counterexamples import Claim, all_claims
from microclip_lab.theory.plot import picture, rendered
from microclip_lab.theory.table import Measure, TheoryRow, best, lines, rows, sentences, write_csv

RUNS = 16  # simulated runs per micro-batch size


def run(config: TheoryConfig) -> list[TheoryRow]:
    """Print the table and write the files."""
    # results to standard output, progress to standard error, so that each can be redirected
    console, log = Console(), Console(stderr=True)
    config.out.mkdir(parents=True, exist_ok=True)
    found = rows(config, _measure(config, log) if config.simulate else None)
    sgd = lines(config)
    console.print(bounds_table(config, found))
    for line in sgd:
        value = "does not apply: too many long draggers for this T and B"
        console.print(
            f"{line.name + ':':<55} {value if line.bound is None else _short(line.bound.total)}"
        )
    console.print()
    for sentence in sentences(config, found):
        console.print(sentence, highlight=False)
    if config.simulate:
        console.print(simulated(found), highlight=False)
    if config.claims:
        console.print()
        console.print(claims_table(all_claims()))
    console.print()
    figure = picture(config, found, sgd)
    files = {
        "picture": (config.out / "theory.png", rendered(figure, "png")),
        "vector": (config.out / "theory.svg", rendered(figure, "svg")),
        "table": (config.out / "theory.csv", write_csv(found).encode()),
    }
    for what, (path, content) in files.items():
        path.write_bytes(content)
        # soft_wrap and no markup: print the path unchanged, however long or odd
        console.print(f"{what + ':':<9}{path}", soft_wrap=True, markup=False, highlight=False)
    return found


def bounds_table(config: TheoryConfig, found: Sequence[TheoryRow]) -> Table:
    """Return the table of bounds; the smallest sum of each kind is bold."""
    table = Table(
        title=f"Gradient norm after {config.steps:,} steps: bias, bias + transient",
        title_justify="left",
    )
    table.add_column("b", justify="right", no_wrap=True)
    for name in ("printed", "corrected", "symmetric"):
        table.add_column(f"{name}\nbias", justify="right", no_wrap=True)
        table.add_column("\nsum", justify="right", no_wrap=True)
    if config.simulate:
        table.add_column("simulated\nunit", justify="right", no_wrap=True)
        table.add_column("\nmin", justify="right", no_wrap=True)
    winners = {kind: best(found, kind) for kind in ("printed", "corrected", "symmetric")}
    for row in found:
        cells = []
        for kind, winner in winners.items():
            bound = row.bounds[kind]
            total = "-" if bound is None else _short(bound.total)
            cells += [
                "-" if bound is None else _short(bound.bias),
                f"[bold]{total}[/bold]" if row is winner else total,
            ]
        if config.simulate:
            cells += ["" if m is None else _short(m) for m in (row.measured, row.measured_min)]
        table.add_row(str(row.b), *cells)
    return table


def claims_table(claims: Sequence[Claim]) -> Table:
    """Return the table of the paper's statements, each with both sides of an instance."""
    table = Table(title="Statements of the paper, checked", title_justify="left")
    table.add_column("it says", ratio=2)
    table.add_column("left", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("right", justify="right", no_wrap=True)
    table.add_column("holds", no_wrap=True)
    for claim in claims:
        table.add_row(
            f"{claim.says}\n[dim]{claim.where}[/dim]",
            _short(claim.left),
            claim.relation,
            _short(claim.right),
            "yes" if claim.holds else "no",
        )
    return table


def simulated(found: Sequence[TheoryRow]) -> str:
    """Return a sentence: whether the simulated runs respect the bounds."""
    broken = [
        row.b
        for row in found
        for bound in (row.bounds["corrected"], row.bounds["symmetric"])
        if bound is not None and row.measured is not None and row.measured > bound.total
    ]
    if broken:
        return (
            "Simulated with the unit rule, the mean gradient norm exceeds a corrected bound at "
            f"b = {', '.join(map(str, sorted(set(broken))))}: please report it."
        )
    return (
        f"Simulated with the unit rule ({RUNS} runs each), the mean gradient norm stays below both "
        "corrected bounds at every b. No theorem covers the min rule, except at b = B."
    )


def _measure(config: TheoryConfig, log: Console) -> Measure:
    # imported here: the formulas alone need no torch
    from microclip.rules import MinNorm, Unit
    from microclip_lab.theory.simulator import World, simulate

    def measure(b: int) -> tuple[float, float]:
        log.print(f"simulating b = {b} of {config.sizes[-1]}", highlight=False)
        c, C = config.lengths(b)
        world = World(
            epsilon=config.epsilon,
            c=c,
            C=C,
            sigma=config.sigma,
            L=config.smoothness,
            gap=config.gap,
        )
        unit, least = (
            simulate(world, T=config.steps, B=config.batch_size, b=b, rule=rule, runs=RUNS)
            for rule in (Unit(), MinNorm())
        )
        return unit.mean_norm, least.mean_norm

    return measure


def _short(value: float) -> str:
    return f"{value:.3g}"
