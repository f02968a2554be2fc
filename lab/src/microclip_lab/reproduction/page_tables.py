"""The tables of the page. What they mean is explained in `page`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from microclip.report.blocks import Block, Cell, Paragraph, Table
from microclip.report.statistics import Estimate
from microclip_lab.reproduction import wording
from microclip_lab.reproduction.effects import Effect, Gain
from microclip_lab.reproduction.record_tables import BEST, LAST, ArmRow, View
from microclip_lab.reproduction.tasks import PLAIN
from microclip_lab.reproduction.theory_part import RateTable
from microclip_lab.reproduction.verdicts import PartVerdict, told

SIZES = ("b1", "b2", "b4", "b8", "b16", "b32")
SNAPSHOT_TASKS = ("speech", "cifar10n", "digits")  # tasks with gradient snapshots
HALF = "± is half of the 95 % interval over seeds; intervals of marked gains exclude 0."


def arms_table(
    view: View,
    task: str,
    arms: Sequence[str],
    *,
    key: str = "arms",
    more: Sequence[tuple[str, str]] = (),
) -> Block:
    """Return some arms of a task, with the ids of their runs."""
    rows = {row.arm.name: row for row in view.done(task)}
    shown = [rows[name] for name in arms if name in rows]
    if not shown:
        return Paragraph(f"{wording.capital(wording.named(task))}: not run yet.", "note")
    found = view.task(task)
    headline = found.recipe.headline
    kind = "WER" if found.recipe.lower_is_better else "accuracy"
    any_diverged = any(row.diverged for row in shown)
    more = [each for each in more if any(each[1] in row.figures for row in shown)]
    return Table(
        f"{key}-{task}",
        f"{wording.named(task)}: {kind} on test data in %. {HALF}",
        (
            "arm",
            "what it is",
            "tuned",
            "best checkpoint",
            "gain",
            *(name for name, _ in more),
            "last step",
            "gain, last",
            *(("diverged",) if any_diverged else ()),
            "runs",
        ),
        [
            [
                Cell(row.arm.name),
                Cell(row.arm.about),
                Cell(tuned(row)),
                Cell(wording.percent(row.figures.get(BEST + headline))),
                _gain(row, row.gain),
                *(Cell(wording.percent(row.figures.get(figure))) for _, figure in more),
                Cell(wording.percent(row.figures.get(LAST + headline))),
                _gain(row, row.last_gain),
                *((Cell(f"{len(row.diverged)} of {len(row.records)}"),) if any_diverged else ()),
                Cell(wording.runs(row.records)),
            ]
            for row in shown
        ],
        (False, False, False, *(True,) * (4 + len(more) + any_diverged), False),
        wide=True,
    )


def evidence(view: View, claim: str) -> Block:
    """Return the parts of a claim, additional quantities, and the ids of all runs."""
    found = view.claim(claim)
    rows = [_evidence(part, "decides") for part in found.parts]
    rows += [_evidence(part, "additional") for part in found.also]
    return Table(
        f"evidence-{claim}",
        f"{claim}, {found.claim.title[0].lower()}{found.claim.title[1:]}: {found.verdict}",
        ("quantity", "effect (95 % interval)", "expected", "came out", "role", "runs"),
        rows,
        wide=True,
    )


def _evidence(found: PartVerdict, role: str) -> list[Cell]:
    return [
        Cell(found.part.about),
        Cell(told(found.effect), marked=wording.excludes_zero(found.effect)),
        Cell(found.expected),
        Cell(found.came_out),
        Cell(role),
        Cell("-" if found.effect is None else wording.runs(found.effect.records) or "-"),
    ]


def tuned(row: ArmRow) -> str:
    """Return the tuned values of an arm, in words."""
    if row.is_lost:
        return "diverged with every value"
    rate = f"rate {wording.number(row.rate)}"
    if row.arm.tuned == "learning_rate":
        return rate
    if row.arm.tuned is None:
        return f"{rate}, from {row.arm.rate_of}"
    name = {"max_grad_norm": "norm", "bound": "bound"}[row.arm.tuned]
    return f"{name} {wording.number(row.value)}, {rate} from {row.arm.rate_of}"


def _gain(row: ArmRow, found: Effect | None) -> Cell:
    if row.arm.name == PLAIN:
        return Cell("-")
    return Cell(wording.gain(found), marked=wording.excludes_zero(found))


def rates(table: RateTable, place: int) -> list[Block]:
    """Return Table 1 for one instance, with and without clipping."""
    given = ", ".join(f"{name} = {value:g}" for name, value in table.inputs.items())
    least = {
        "update of the theorem (Unit)": min(table.rows, key=lambda row: row.unit).b,
        "Algorithm 1 (MinNorm)": min(table.rows, key=lambda row: row.smallest).b,
    }
    bests = [
        f"the bound {name} is smallest at b = {b}" if b else f"the bound {name} applies to no b"
        for name, b in (
            ("as printed", table.best["printed"]),
            ("as corrected", table.best["corrected"]),
        )
    ]
    bests += [f"the simulated {name} is best at b = {b}" for name, b in least.items()]
    return [
        Table(
            f"rates-{place}",
            f"Instance {place}, {table.case.name}: {given}",
            (
                "b",
                "printed",
                "corrected",
                "symmetric noise",
                "measured: Unit",
                "measured: MinNorm",
            ),
            [
                [
                    Cell(str(row.b)),
                    Cell("not stated" if row.printed is None else wording.number(row.printed)),
                    Cell(wording.number(row.corrected)),
                    Cell(wording.number(row.symmetric)),
                    Cell(wording.number(row.unit)),
                    Cell(wording.number(row.smallest)),
                ]
                for row in table.rows
            ],
            (True,) * 6,
        ),
        Table(
            f"rates-sgd-{place}",
            f"The same instance without clipping ({table.case.name})",
            ("rate", "bound", "measured"),
            [
                [
                    Cell(line.name),
                    Cell("does not apply" if line.bound is None else wording.number(line.bound)),
                    Cell(wording.number(line.measured)),
                ]
                for line in table.lines
            ],
            (False, True, True),
        ),
        Paragraph(f"In words: {table.case.why}. Here {wording.listed(bests)}.", "note"),
    ]


def cosine_table(view: View) -> Block:
    """Return mean cosines of the three kinds of pairs, by task and snapshot."""
    rows = []
    for name in SNAPSHOT_TASKS:
        ids = wording.runs(view.runs(name, PLAIN))
        for step, found in view.moments.get(name, {}).get(PLAIN, {}).items():
            rows.append(
                [
                    Cell(wording.named(name)),
                    Cell(f"{step:,}"),
                    *(
                        Cell(_cosine(found, kind))
                        for kind in ("dragger_benign", "benign_benign", "dragger_dragger")
                    ),
                    Cell(_cosine(found, "dragger_to_mean")),
                    Cell(_cosine(found, "benign_to_mean")),
                    Cell(ids),
                ]
            )
    return Table(
        "cosine-table",
        "The same in numbers: mean ± half of the 95 % interval over seeds; in parentheses the "
        "standard deviation over pairs",
        (
            "task",
            "step",
            "dragger-benign",
            "benign-benign",
            "dragger-dragger",
            "dragger to mean benign",
            "benign to mean of others",
            "runs",
        ),
        rows,
        (False, *(True,) * 6, False),
        wide=True,
    )


def _cosine(found: Mapping[str, Estimate], kind: str) -> str:
    said = wording.spread(found.get(kind), places=3)
    deviation = found.get(f"{kind}_spread")
    return said if deviation is None else f"{said} ({deviation.mean:.2f})"


def ratio_table(view: View, task: str) -> Block:
    """Return c-hat by micro-batch size, both ways round."""
    rows = view.ratios.get(task, [])
    if not rows:
        return Paragraph(f"{wording.capital(wording.named(task))}: not run yet.", "note")
    by_step = view.moments[task]
    unmatched = max(row.unmatched for row in rows)
    note = f" Seeds whose losses cannot be matched: {unmatched}." if unmatched else ""
    return Table(
        f"ratios-{task}",
        f"{wording.named(task)}: ratios of mean norms, ± half of the 95 % interval.{note}",
        (
            "arm",
            "b",
            "dragger/benign, last step",
            "at matched loss",
            "benign/dragger, last step",
            "at matched loss",
            "loss of benign, last step",
            "of draggers",
            "runs",
        ),
        [
            [
                Cell(row.arm),
                Cell(str(row.size)),
                *(
                    Cell(wording.spread(where.get(orientation), places=3))
                    for orientation in ("dragger_over_benign", "benign_over_dragger")
                    for where in (row.at_step, row.at_loss)
                ),
                *(
                    Cell(wording.spread(list(by_step[row.arm].values())[-1].get(name), places=3))
                    for name in ("loss_benign", "loss_draggers")
                ),
                Cell(wording.runs(row.records)),
            ]
            for row in rows
        ],
        (False, *(True,) * 7, False),
        wide=True,
    )


def domain_table(view: View) -> Block:
    """Return accuracies by domain."""
    rows = view.done("mixture")
    if not rows:
        return Paragraph("Mixture: not run yet.", "note")
    domains = ("movie", "nyt", "tweets", "amazon")

    def cells(row: ArmRow) -> list[Cell]:
        found = []
        for domain in domains:
            figure = f"{BEST}accuracy_{domain}"
            reached = wording.percent(row.figures.get(figure))
            if row.arm.name == PLAIN:
                found += [Cell(reached), Cell("-")]
                continue
            gain = view.effect(Gain("mixture", (row.arm.name,), figures=(figure,)))
            found += [
                Cell(reached),
                Cell(wording.gain(gain), marked=wording.excludes_zero(gain)),
            ]
        return found

    return Table(
        "domains",
        f"mixture: accuracy on test data in %, at the best checkpoint, by domain. {HALF}",
        (
            "arm",
            "what it is",
            "tuned",
            "all",
            *(heading for domain in domains for heading in (domain, "gain")),
            "runs",
        ),
        [
            [
                Cell(row.arm.name),
                Cell(row.arm.about),
                Cell(tuned(row)),
                Cell(wording.percent(row.figures.get(BEST + "accuracy"))),
                *cells(row),
                Cell(wording.runs(row.records)),
            ]
            for row in rows
        ],
        (False, False, False, *(True,) * (1 + 2 * len(domains)), False),
        wide=True,
    )


def weights(view: View) -> list[Block]:
    """Return the weights of domains with clipping by domain."""
    found = view.domain_weights.get("mixture", {})
    if not found:
        return []
    domains = list(next(iter(found.values())))
    rows = [
        [
            Cell(arm),
            *(Cell(wording.spread(weights[domain])) for domain in domains),
            Cell(wording.runs(view.runs("mixture", arm))),
        ]
        for arm, weights in found.items()
    ]
    caption = "mixture: mean weight of an example of each domain; the overall average is 1"
    return [
        Table(
            "domain-weights",
            caption,
            ("arm", *domains, "runs"),
            rows,
            (False, *(True,) * len(domains), False),
            wide=True,
        )
    ]
