"""The paper's tables and figures, ours beside them: what is shown, and how it is read.

A section whose runs are missing says so. No sentence here says what came out; tables and figures
do, and the verdicts, which are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from microclip.report.blocks import Block, Cell, Figure, Paragraph, Section, Table
from microclip.report.statistics import Estimate
from microclip.reproduction import figures, wording
from microclip.reproduction.arms import PLAIN
from microclip.reproduction.effects import Effect
from microclip.reproduction.quantities import Gain
from microclip.reproduction.tables import BEST, LAST, ArmRow, looked_at
from microclip.reproduction.theory_part import RateTable, rate_tables
from microclip.reproduction.verdicts import PartVerdict, told
from microclip.reproduction.view import View

SIZES = ("b1", "b2", "b4", "b8", "b16", "b32")
INSIDE = ("speech", "cifar10n", "digits")  # tasks whose gradients are looked at
HALF = "± is half of the 95 % interval over seeds; marked gains have an interval without 0."


def verdicts(view: View) -> Section:
    """Return the table that the page begins with."""
    rows = [
        [
            Cell(f"{found.claim.id} {found.claim.title}"),
            Cell(found.claim.there or "-"),
            Cell("\n".join(part.sentence for part in found.parts)),
            Cell(found.verdict, marked=found.verdict in ("holds", "does not hold")),
        ]
        for found in view.claims
    ]
    return Section(
        "verdicts",
        "Verdicts",
        [
            Table(
                "verdict-table",
                "What is claimed, there and here",
                ("claim", "in the paper", "here: effect (95 % interval)", "verdict here"),
                rows,
                wide=True,
            ),
            Paragraph(
                "C1 to C7 are the paper's claims, M1 to M4 our own. What would bear each one out "
                "was written down before the runs. An effect is a mean over paired seeds, in "
                "points of accuracy or error rate, positive where clipping is better, unless it "
                "says otherwise; its interval is a 95 % t-interval over seeds. A claim holds if "
                "all its intervals lie where they are expected; it does not if one lies elsewhere, "
                "or so near to 0 that nothing that matters is left (0.5 points); else this scale "
                "does not decide it. There is no correction for looking at many claims at once.",
                "note",
            ),
        ],
    )


def table_1(view: View) -> Section:
    """Return the rates over b."""
    tables = rate_tables()
    blocks: list[Block] = [
        Paragraph(
            "The paper bounds the gradient norm that T steps reach, min_t E|g_t|, in three "
            "theorems: SGD without draggers (after Bu et al.), SGD with draggers, and micro-batch "
            "clipping. The last two do not hold as printed (see what the paper gets wrong); what "
            "holds instead is derived on the page on the theory. Here all of them are computed, "
            "beside the least norm of simulated trainings that keep every assumption."
        ),
        Figure(
            "rates",
            "Table 1 over b: bounds, and what is measured",
            "Solid lines are upper bounds, dotted ones simulations of the theorem's update (unit "
            "length) and of Algorithm 1 (least length). A bound may lie far above what happens; it "
            "must never lie below the dotted line of the theorem's update. Where a line is "
            "missing, its theorem says nothing.",
            {table.case.name: figures.rates(table) for table in tables},
            "instance",
            380,
        ),
    ]
    for place, table in enumerate(tables, start=1):
        blocks += _rates(table, place)
    return Section("table-1", "Table 1: rates of convergence", blocks)


def figure_1(view: View) -> Section:
    """Return the cosines along training."""
    choices, pairs = {}, []
    for name in INSIDE:
        plain = view.moments.get(name, {}).get(PLAIN)
        if plain is None:
            continue
        choices[wording.named(name)] = figures.cosines(plain)
        draggers, benign = looked_at(view.study, view.records, view.task(name))
        pairs.append(
            f"{wording.named(name)} {draggers} x {benign} = {draggers * benign:,} of a dragger and "
            f"a benign example, {benign * (benign - 1) // 2:,} of benign examples, "
            f"{draggers * (draggers - 1) // 2:,} of draggers"
        )
    blocks: list[Block] = [
        Paragraph(
            "The paper compares 100 pairs of a canary's and a benign gradient with 100 pairs of "
            "benign ones along training: the first are nearly orthogonal, the second are not. Its "
            "data is not published. Draggers here are canaries (speech), labels that people got "
            "wrong (CIFAR-10N) and wrong labels (digits)."
        )
    ]
    if choices:
        blocks += [
            Figure(
                "cosines",
                "Mean cosines of pairs of gradients along plain training",
                "Each line is a kind of pair, its band the 95 % interval over seeds. If draggers "
                "are orthogonal to the rest, the dashed line lies at 0, below the line of benign "
                "pairs. The theory takes the third kind, two draggers, for 1.",
                choices,
                "task",
            ),
            Paragraph(
                f"Pairs in each look at each seed, at least: {'; '.join(pairs)}.",
                "note",
            ),
            _cosine_table(view),
        ]
    blocks.append(evidence(view, "C1"))
    return Section("figure-1", "Figure 1: are draggers orthogonal?", blocks)


def table_2(view: View) -> Section:
    """Return the sweet spot, and the convergence curves of Figure 2."""
    blocks: list[Block] = [
        Table(
            "paper-2",
            "The paper's Table 2: WER on LibriSpeech in %, mean and deviation of 3 runs",
            ("test set", "plain", "b = 1", "b = 4", "b = 512 = B"),
            [
                [Cell(text) for text in row]
                for row in (
                    ("test-clean", "1.93 ± 0.04", "2.40 ± 0.13", "1.85 ± 0.07", "1.94 ± 0.00"),
                    ("test-other", "3.99 ± 0.01", "4.86 ± 0.24", "3.80 ± 0.05", "4.03 ± 0.03"),
                )
            ],
            (False, *(True,) * 4),
        )
    ]
    choices = {}
    for name in ("speech", "cifar10n", "digits"):
        rows = {row.arm.name: row for row in view.done(name)}
        sizes = sorted((rows[arm] for arm in SIZES if arm in rows), key=lambda row: row.size)
        if not sizes:
            continue
        task = view.task(name)
        title = "WER, %" if task.recipe.lower_is_better else "accuracy, %"
        drawn = figures.sweet_spot(sizes, rows.get(PLAIN), task.figure, title)
        choices[wording.named(name)] = drawn
    if choices:
        blocks.append(
            Figure(
                "sweet-spot",
                "By micro-batch size",
                "Above, the test figure at the checkpoint that validation chose, with its 95 % "
                "interval over seeds; dashed, plain training with its band. Below, the gain "
                "against plain training, seed by seed: above 0 is better, and an interval that "
                "does not touch 0 is a difference that the seeds agree on. b = B is plain "
                "training.",
                choices,
                "task",
                480,
            )
        )
    for name in ("speech", "cifar10n", "digits"):
        blocks.append(arms_table(view, name, (PLAIN, *SIZES)))
    blocks.append(evidence(view, "C2"))
    blocks.append(
        Paragraph(
            "Figure 2 of the paper shows the WER of plain training and of b = 4 over steps, both "
            "axes logarithmic; its data is not published."
        )
    )
    curves = {
        wording.named(name): figures.convergence(
            found, (PLAIN, "b1", "b4", "b8", "unit-b1"), view.task(name).recipe.lower_is_better
        )
        for name in ("speech", "cifar10n", "digits")
        if (found := view.curves.get(name))
    }
    if curves:
        blocks.append(
            Figure(
                "convergence",
                "Convergence",
                "Mean error on validation data over steps, both axes logarithmic, with 95 % "
                "intervals over seeds. Each line has its own learning rate, the best on seeds of "
                "their own. Of two lines, the lower one is ahead at that step.",
                curves,
                "task",
                400,
            )
        )
    blocks.append(evidence(view, "C3"))
    return Section("table-2", "Table 2 and Figure 2: sweet spot and convergence", blocks)


def table_3(view: View) -> Section:
    """Return c-hat in both orientations."""
    blocks: list[Block] = [
        Paragraph(
            "The paper gives c-hat, a ratio of mean norms of draggers' and benign gradients, as "
            "6.18 at b = 1, 5.74 at b = 4 and 4.42 at b = 512 = B. It prints benign over dragger, "
            "and means by all that is said of it dragger over benign; here are both. Arms learn at "
            "different speeds, so the ratio is taken twice: at the last step, and at the loss on "
            "benign examples that the slowest arm ends with. Of benign norms the tenth that is "
            "largest is left out, as in the paper."
        )
    ]
    for name in INSIDE:
        blocks.append(_ratio_table(view, name))
    blocks.append(evidence(view, "C4"))
    return Section("table-3", "Table 3: c-hat by micro-batch size", blocks)


def table_4(view: View) -> Section:
    """Return the figures of vision."""
    blocks: list[Block] = [
        Table(
            "paper-4",
            "The paper's Table 4: DeiT-B on ImageNet in %, one run each",
            ("", "top-1", "top-5"),
            [
                [Cell(text) for text in row]
                for row in (("plain", "81.8", "95.8"), ("b = 32 of 4096", "83.3", "96.8"))
            ],
            (False, True, True),
        )
    ]
    for name in ("cifar10n", "digits", "digits-sgd"):
        if view.done(name):
            top5 = (("top-5", BEST + "top5_accuracy"),)
            blocks.append(arms_table(view, name, (PLAIN, *SIZES), key="top", more=top5))
    blocks.append(evidence(view, "C5"))
    return Section("table-4", "Table 4: vision", blocks)


def tables_5_and_6(view: View) -> list[Section]:
    """Return the figures of language: by domain, and of the largest domain alone."""
    mixture = Section(
        "table-5",
        "Table 5: a mixture of unequal domains",
        [
            Paragraph(
                "The paper fine-tunes T5 on SuperGLUE, eight tasks of 250 to 101,000 examples. "
                "ReCoRD, the largest, gains 0.4 points at b = 16 of 2048, six of the other seven "
                "lose 0.6 to 2.2. Here are VADER's four domains in the ratio 20 : 4 : 2 : 1."
            ),
            _domain_table(view),
            evidence(view, "C7"),
        ],
    )
    movie = Section(
        "table-6",
        "Table 6: the largest domain alone",
        [
            Paragraph("T5 on ReCoRD alone: 84.5 plain, 84.8 clipped; one run each."),
            arms_table(view, "movie", (PLAIN, "b1", "b4", "b8")),
            evidence(view, "C6"),
        ],
    )
    return [mixture, movie]


def beyond(view: View) -> Section:
    """Return what the paper leaves open."""
    canaries = (
        ("canaries trained on", BEST + "canary_wer"),
        ("canaries never heard", BEST + "unseen_canary_wer"),
    )
    rules = (PLAIN, "b1", "unit-b1", "median-b1", "automatic-b1", "b4", "unit-b4")
    return Section(
        "beyond",
        "Beyond the paper",
        [
            Paragraph(
                "A bound for each domain (domains=): micro-batches never mix domains, and each is "
                "rescaled to the smallest norm of its own domain. Part of what that does is to "
                "give domains other weights, so plain training with those weights is a control.",
            ),
            *_weights(view),
            evidence(view, "M1"),
            Paragraph(
                "Other rules at small b. MinNorm rescales every gradient to the shortest one, "
                "which at b = 1 can be very short. Unit rescales to 1, Median clips to the median "
                "norm, Automatic divides by the norm plus a constant."
            ),
            arms_table(view, "digits", rules, key="rules"),
            evidence(view, "M3"),
            Paragraph(
                "Memorisation: canaries are texts spoken too fast, some of them many times in the "
                "training data. A model that gets them right has memorised them; a high error rate "
                "on them is the protection that is hoped for."
            ),
            arms_table(
                view, "speech", (PLAIN, *SIZES, "unit-b1", "unit-b4"), key="canaries", more=canaries
            ),
            evidence(view, "M2"),
            Paragraph("Clean data: what clipping costs when nothing drags."),
            arms_table(view, "clean-digits", (PLAIN, "b1", "b4", "unit-b1")),
            evidence(view, "M4"),
        ],
    )


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
    """Return the parts of a claim, with what stands beside it, and the ids of all runs."""
    found = view.claim(claim)
    rows = [_evidence(part, "decides") for part in found.parts]
    rows += [_evidence(part, "beside it") for part in found.also]
    return Table(
        f"evidence-{claim}",
        f"{claim}, {found.claim.title[0].lower()}{found.claim.title[1:]}: {found.verdict}",
        ("quantity", "effect (95 % interval)", "expected", "came out", "role", "runs"),
        rows,
        wide=True,
    )


def _evidence(found: PartVerdict, role: str) -> list[Cell]:
    part = found.part
    expected = {
        "above": "above 0",
        "below": "below 0",
        "near": f"within ± {part.margin:g}",
        "not below": f"above -{part.margin:g}",
    }[part.expects]
    verdict = {
        "holds": "as expected",
        "does not hold": "not so",
        "undecided": "undecided",
        "not looked at": wording.NOT_YET,
    }[found.verdict]
    return [
        Cell(part.about),
        Cell(told(found.effect), marked=wording.excludes_zero(found.effect)),
        Cell(expected),
        Cell(verdict),
        Cell(role),
        Cell("-" if found.effect is None else wording.runs(found.effect.records) or "-"),
    ]


def tuned(row: ArmRow) -> str:
    """Return what an arm was tuned to, in words."""
    if row.is_lost:
        return "diverged with every value"
    rate = f"rate {wording.number(row.rate)}"
    if row.arm.tuned == "learning_rate":
        return rate
    if row.arm.tuned is None:
        return f"{rate}, that of {row.arm.rate_of}"
    name = {"max_grad_norm": "norm", "bound": "bound"}[row.arm.tuned]
    return f"{name} {wording.number(row.value)}, {rate} of {row.arm.rate_of}"


def _gain(row: ArmRow, found: Effect | None) -> Cell:
    if row.arm.name == PLAIN:
        return Cell("-")
    return Cell(wording.gain(found), marked=wording.excludes_zero(found))


def _rates(table: RateTable, place: int) -> list[Block]:
    given = ", ".join(f"{name} = {value:g}" for name, value in table.inputs.items())
    least = {
        "update of the theorem (Unit)": min(table.rows, key=lambda row: row.unit).b,
        "Algorithm 1 (MinNorm)": min(table.rows, key=lambda row: row.smallest).b,
    }
    bests = [
        f"the bound {name} has its least at b = {b}" if b else f"the bound {name} applies to no b"
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


def _cosine_table(view: View) -> Block:
    rows = []
    for name in INSIDE:
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
                ]
            )
    return Table(
        "cosine-table",
        "The same in numbers: mean ± half of the 95 % interval over seeds; in brackets the "
        "standard deviation of single pairs",
        (
            "task",
            "step",
            "dragger-benign",
            "benign-benign",
            "dragger-dragger",
            "dragger to mean benign",
            "benign to mean of others",
        ),
        rows,
        (False, *(True,) * 6),
        wide=True,
    )


def _cosine(found: Mapping[str, Estimate], kind: str) -> str:
    said = wording.spread(found.get(kind), places=3)
    deviation = found.get(f"{kind}_spread")
    return said if deviation is None else f"{said} ({deviation.mean:.2f})"


def _ratio_table(view: View, task: str) -> Block:
    rows = view.ratios.get(task, [])
    if not rows:
        return Paragraph(f"{wording.capital(wording.named(task))}: not run yet.", "note")
    by_step = view.moments[task]
    unmatched = max(row.unmatched for row in rows)
    note = f" Seeds in which losses cannot be matched: {unmatched}." if unmatched else ""
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


def _domain_table(view: View) -> Block:
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


def _weights(view: View) -> list[Block]:
    found = view.domain_weights.get("mixture", {})
    if not found:
        return []
    domains = list(next(iter(found.values())))
    rows = [
        [Cell(arm), *(Cell(wording.spread(weights[domain])) for domain in domains)]
        for arm, weights in found.items()
    ]
    caption = "mixture: what an example of each domain weighed on average; 1 is the average example"
    return [
        Table("domain-weights", caption, ("arm", *domains), rows, (False, *(True,) * len(domains)))
    ]
