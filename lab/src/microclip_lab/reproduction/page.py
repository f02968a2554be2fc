"""The page of the reproduction: the paper's tables and figures with ours beside them.

A section whose runs are missing says so. No sentence here says what came out: tables, figures and
computed verdicts do. `appendix` has the rest of the page.
"""

from __future__ import annotations

from pathlib import Path

import microclip
from microclip.files import write_whole
from microclip.report.blocks import Block, Cell, Figure, Page, Paragraph, Section, Table
from microclip.report.page import render
from microclip_lab.reproduction import appendix, figures, page_tables, wording
from microclip_lab.reproduction.page_tables import SIZES, SNAPSHOT_TASKS
from microclip_lab.reproduction.record_tables import BEST, View, is_default_plan, looked_at
from microclip_lab.reproduction.records import Records
from microclip_lab.reproduction.results import progress
from microclip_lab.reproduction.study import Study
from microclip_lab.reproduction.tasks import PLAIN
from microclip_lab.reproduction.theory_part import rate_tables
from microclip_lab.reproduction.wording import listed


def of_the_paper(view: View) -> list[Section]:
    """Return the verdicts, the paper's results in its order, and what goes beyond it."""
    return [
        verdicts(view),
        table_1(view),
        figure_1(view),
        table_2(view),
        table_3(view),
        table_4(view),
        *tables_5_and_6(view),
        beyond(view),
    ]


def verdicts(view: View) -> Section:
    """Return the table of verdicts."""
    rows = [
        [
            Cell(f"{found.claim.id} {found.claim.title}"),
            Cell(found.claim.there or "-"),
            Cell("\n".join(part.answer for part in found.parts)),
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
                "What is claimed, in the paper and here",
                (
                    "claim",
                    "in the paper",
                    "here: effect (95 % interval), as expected?",
                    "verdict here",
                ),
                rows,
                wide=True,
            ),
            Paragraph(
                "C1 to C7 are the paper's claims, M1 to M4 our own. The criteria were written down "
                "before the runs. An effect is a mean over paired seeds, in points of accuracy or "
                "error rate, positive where clipping is better, unless stated otherwise; its "
                "interval is a 95 % t-interval over seeds. A claim holds if all its intervals lie "
                "where they are expected. It does not hold if one lies on the other side, or so "
                "close to 0 that no relevant effect is left (the margin: 0.5 points, or as given "
                "with a quantity). Otherwise it is undecided at this scale. There is no correction "
                "for multiple comparisons.",
                "note",
            ),
        ],
    )


def table_1(view: View) -> Section:
    """Return the rates by b."""
    tables = rate_tables()
    blocks: list[Block] = [
        Paragraph(
            "The paper bounds the gradient norm after T steps, min_t E|g_t|, in three theorems: "
            "SGD without draggers (after Bu et al.), SGD with draggers, and micro-batch clipping. "
            "The last two do not hold as printed (see what the paper gets wrong); the page on "
            "theory derives corrected ones. Here all of them are computed, next to the smallest "
            "norm in simulated runs that satisfy every assumption."
        ),
        Figure(
            "rates",
            "Table 1 by b: bounds and measurements",
            "Solid lines are upper bounds, dotted lines simulations of the theorem's update (unit "
            "length) and of Algorithm 1 (smallest length). A bound may be far above the "
            "measurement, but never below the dotted line of the theorem's update. Where a line is "
            "missing, its theorem does not apply.",
            {table.case.name: figures.rates(table) for table in tables},
            "instance",
            380,
        ),
    ]
    for place, table in enumerate(tables, start=1):
        blocks += page_tables.rates(table, place)
    return Section("table-1", "Table 1: rates of convergence", blocks)


def figure_1(view: View) -> Section:
    """Return the cosines during training."""
    choices, pairs = {}, []
    for name in SNAPSHOT_TASKS:
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
            "benign ones during training: the former are nearly orthogonal, the latter are not. "
            "Its data is not published. Draggers here are canaries (speech), wrong human labels "
            "(CIFAR-10N) and synthetic wrong labels (digits)."
        )
    ]
    if choices:
        blocks += [
            Figure(
                "cosines",
                "Mean cosines of pairs of gradients during plain training",
                "Each line is a kind of pair, its band the 95 % interval over seeds. If draggers "
                "are orthogonal to the rest, the dashed line is at 0, below the line of benign "
                "pairs. The theory assumes 1 for the third kind, two draggers.",
                choices,
                "task",
            ),
            Paragraph(
                f"Smallest number of pairs per snapshot and seed: {'; '.join(pairs)}.",
                "note",
            ),
            page_tables.cosine_table(view),
        ]
    blocks.append(page_tables.evidence(view, "C1"))
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
                "Top: the test figure of the checkpoint selected on validation data, with its 95 % "
                "interval over seeds; dashed, plain training with its band. Bottom: the gain over "
                "plain training, paired by seed. Above 0 is better, and an interval that excludes "
                "0 is a consistent difference. b = B is plain training.",
                choices,
                "task",
                480,
            )
        )
    for name in ("speech", "cifar10n", "digits"):
        blocks.append(page_tables.arms_table(view, name, (PLAIN, *SIZES)))
    blocks.append(page_tables.evidence(view, "C2"))
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
                "Mean error on validation data by step, both axes logarithmic, with 95 % intervals "
                "over seeds. Each line has its own learning rate, tuned on separate seeds. Lower "
                "is better. The runs are those in the tables of arms.",
                curves,
                "task",
                400,
            )
        )
    blocks.append(page_tables.evidence(view, "C3"))
    return Section("table-2", "Table 2 and Figure 2: sweet spot and convergence", blocks)


def table_3(view: View) -> Section:
    """Return c-hat, both ways round."""
    blocks: list[Block] = [
        Paragraph(
            "The paper gives c-hat, a ratio of mean norms of draggers' and benign gradients, as "
            "6.18 at b = 1, 5.74 at b = 4 and 4.42 at b = 512 = B. It prints benign over dragger, "
            "but its text only makes sense for dragger over benign; both are shown here. Arms "
            "learn at different speeds, so the ratio is taken twice: at the last step, and at the "
            "loss on benign examples that the slowest arm ends with. The largest tenth of benign "
            "norms is left out, as in the paper."
        )
    ]
    for name in SNAPSHOT_TASKS:
        blocks.append(page_tables.ratio_table(view, name))
    blocks.append(page_tables.evidence(view, "C4"))
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
            blocks.append(page_tables.arms_table(view, name, (PLAIN, *SIZES), key="top", more=top5))
    blocks.append(page_tables.evidence(view, "C5"))
    return Section("table-4", "Table 4: vision", blocks)


def tables_5_and_6(view: View) -> list[Section]:
    """Return the figures of language: by domain, and of the largest domain alone."""
    mixture = Section(
        "table-5",
        "Table 5: a mixture of unequal domains",
        [
            Paragraph(
                "The paper fine-tunes T5 on SuperGLUE, eight tasks of 250 to 101,000 examples. "
                "ReCoRD, the largest, gains 0.4 points at b = 16 of 2048; six of the other seven "
                "lose 0.6 to 2.2. Here we use VADER's four domains in the ratio 20 : 4 : 2 : 1."
            ),
            page_tables.domain_table(view),
            page_tables.evidence(view, "C7"),
        ],
    )
    movie = Section(
        "table-6",
        "Table 6: the largest domain alone",
        [
            Paragraph("T5 on ReCoRD alone: 84.5 plain, 84.8 clipped; one run each."),
            page_tables.arms_table(view, "movie", (PLAIN, "b1", "b4", "b8")),
            page_tables.evidence(view, "C6"),
        ],
    )
    return [mixture, movie]


def beyond(view: View) -> Section:
    """Return what goes beyond the paper."""
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
                "rescaled to the smallest norm in its domain. This also changes the weights of "
                "domains, so plain training with the same weights is a control.",
            ),
            *page_tables.weights(view),
            page_tables.evidence(view, "M1"),
            Paragraph(
                "Other rules at small b. MinNorm rescales every gradient to the smallest norm, "
                "which can be tiny at b = 1. Unit rescales to 1, Median clips to the median norm, "
                "Automatic divides by the norm plus a constant."
            ),
            page_tables.arms_table(view, "digits", rules, key="rules"),
            page_tables.evidence(view, "M3"),
            Paragraph(
                "Memorization: canaries are texts spoken too fast, some of them repeated many "
                "times in the training data. A model that gets them right has memorized them; a "
                "high error rate on them is the desired protection."
            ),
            page_tables.arms_table(
                view, "speech", (PLAIN, *SIZES, "unit-b1", "unit-b4"), key="canaries", more=canaries
            ),
            page_tables.evidence(view, "M2"),
            Paragraph("Clean data: what clipping costs when nothing drags."),
            page_tables.arms_table(view, "clean-digits", (PLAIN, "b1", "b4", "unit-b1")),
            page_tables.evidence(view, "M4"),
        ],
    )


FILE = "reproduction.html"
TITLE = "Micro-batch clipping, reproduced at a small scale"

VERDICTS = {  # of one claim, and of several
    "holds": ("holds", "hold"),
    "does not hold": ("does not hold", "do not hold"),
    "undecided": ("is undecided", "are undecided"),
    "not looked at": ("is not run yet", "are not run yet"),
}


def write_page(study: Study, records: Records, out: Path) -> Path:
    """Write out/reproduction.html."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / FILE
    write_whole(path, render(assemble(View(study, records))))
    return path


def assemble(view: View) -> Page:
    """Return the whole page."""
    return Page(
        title=TITLE,
        verdict=opening(view),
        sections=[
            *of_the_paper(view),
            appendix.controls(view),
            appendix.tuning(view),
            appendix.wrong(view),
            appendix.full_scale(view),
            appendix.how_to_repeat(view),
            appendix.every_run(view),
        ],
        made_by=f"Made by microclip {microclip.__version__} with microclip reproduce.",
    )


def opening(view: View) -> list[str]:
    """Return the opening sentences."""
    said = [
        "The experiments of Revisit Micro-batch Clipping (Lun Wang, ICLR 2025, arXiv 2408.16204), "
        "at the scale of one night on two cores, with controls. Null results are results."
    ]
    for by, whose in (("paper", "The paper's claims"), ("microclip", "Our own")):
        found: dict[str, list[str]] = {}
        for one in view.claims:
            if one.claim.by == by:
                found.setdefault(one.verdict, []).append(one.claim.id)
        words = [
            f"{listed(found[v])} {VERDICTS[v][len(found[v]) > 1]}" for v in VERDICTS if v in found
        ]
        said.append(f"{whose}, at this scale: {'; '.join(words)}.")
    runs = progress(view.study, view.records)
    if runs["done"] < runs["expected"]:
        said.append(
            f"{runs['done']} of {runs['expected']} runs are done: all results are preliminary."
        )
    if not is_default_plan(view.study):
        said.append(
            "These runs are shorter than planned, as a smoke test: the verdicts mean nothing."
        )
    return said
