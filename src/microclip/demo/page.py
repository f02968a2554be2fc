"""The demo's page: what the report says of its runs, with what only the demo knows around it."""

from __future__ import annotations

import platform
from importlib.metadata import version

import microclip
from microclip.demo import figures
from microclip.demo.config import TEST_IMAGES, TRAINING_IMAGES, TUNING_SEEDS, VALIDATION_IMAGES
from microclip.demo.plan import FIRST_RATES
from microclip.demo.summary import Summary, percent, points, weights_sentence
from microclip.demo.train import HIDDEN, SCHEDULE, WEIGHT_DECAY
from microclip.report.assemble import GALLERY, Findings
from microclip.report.blocks import Block, Cell, Figure, Page, Paragraph, Section, Table


def page(summary: Summary, findings: Findings) -> Page:
    """Return the whole page; `findings` are those of the demo's run folders."""
    return Page(
        title="Digits with wrong labels, plain and with micro-batch clipping",
        verdict=[summary.verdict, _draggers_sentence(summary, findings)],
        sections=[
            _results(summary, findings),
            _weights(summary),
            *findings.curves,
            *findings.ledgers,
            _rates(summary),
            _what_was_run(summary, findings),
            _limits(summary),
        ],
        made_by=f"Made by microclip {microclip.__version__} with: {command(summary)}",
    )


def _draggers_sentence(summary: Summary, findings: Findings) -> str:
    wrong = findings.dossiers[0].wrong[:GALLERY]
    return (
        f"Of the {len(wrong)} images that dragged most at b = {summary.config.watched}, "
        f"{sum(map(bool, wrong))} have a wrong label; nobody had told which labels are wrong."
    )


def _results(summary: Summary, findings: Findings) -> Section:
    caption = (
        "Above, each dot is the mean test accuracy at one micro-batch size, and the dashed line "
        "with its band is plain training; below, a bar that lies entirely above 0 is a gain that "
        "the seeds agree on. An arrow with a number is a value too far away to be drawn. At b = B "
        "clipping is plain training, so the right end must be exactly 0."
    )
    (drawn,) = (
        block
        for section in findings.comparisons
        for block in section.blocks
        if isinstance(block, Figure)
    )
    rows = [
        [
            Cell(row.name, row.setting or 0),
            Cell(f"{row.learning_rate:g}", row.learning_rate),
            Cell(percent(row.accuracy), row.accuracy.mean),
            Cell(
                "" if row.difference is None else points(row.difference),
                None if row.difference is None else row.difference.mean,
            ),
        ]
        for row in summary.rows
    ]
    blocks: list[Block] = [
        Figure(drawn.key, "Accuracy by micro-batch size", caption, drawn.choices, "metric", 460),
        Table(
            "results",
            f"Every setting, over {summary.config.seeds} seeds",
            ("setting", "learning rate", "test accuracy, %", "points against plain"),
            rows,
            numeric=(False, True, True, True),
            sortable=True,
            sorted_by=0,
        ),
        Paragraph(
            "In brackets: 95 % t-intervals over seeds. Differences are paired: the same images, "
            "wrong labels, initial network and order for every setting of a seed."
        ),
        *(Paragraph(note) for note in summary.notes),
    ]
    return Section("results", "Which micro-batch size?", blocks)


def _weights(summary: Summary) -> Section:
    b = summary.config.watched
    caption = (
        f"Each bar is the mean weight of the micro-batches (b = {b}) with so many wrong labels in "
        "them, as a multiple of the mean weight in their step. The network was never told which "
        f"labels are wrong. {weights_sentence(summary.weights)}"
    )
    rows = [
        [
            Cell(str(w.wrong), w.wrong),
            Cell(f"{w.microbatches:,}", w.microbatches),
            Cell(f"{w.weight:.2f}", w.weight),
        ]
        for w in summary.weights
    ]
    return Section(
        "weights",
        "Which data hurts?",
        [
            Figure(
                "weights",
                "Weight by number of wrong labels",
                caption,
                {"": figures.weights(summary)},
                height=300,
            ),
            Table(
                "weights-table",
                "The same in numbers",
                ("wrong labels", "micro-batches", "mean weight"),
                rows,
                numeric=(True, True, True),
            ),
        ],
    )


def _rates(summary: Summary) -> Section:
    caption = (
        "The validation accuracy of every learning rate that was tried, on the tuning seeds; the "
        "highest point of a line is the rate that its setting was then given. A line that stays "
        "high forgives a rate that is not quite right."
    )
    drawing = figures.rates(summary)
    title = "Validation accuracy against learning rate"
    return Section(
        "rates", "And the learning rate?", [Figure("rates", title, caption, {"": drawing})]
    )


def _what_was_run(summary: Summary, findings: Findings) -> Section:
    config = summary.config
    seeds = config.evaluation_seeds
    wrong = round(config.noise * TRAINING_IMAGES)
    rows = [
        (
            "data",
            f"scikit-learn's digits: {TRAINING_IMAGES} training images, {wrong} of them with a "
            f"wrong label (drawn uniformly from the other nine), {VALIDATION_IMAGES} validation "
            f"and {TEST_IMAGES} test images with clean labels",
        ),
        (
            "network",
            f"64-{HIDDEN}-{HIDDEN}-10 with ReLU, {config.steps} steps of B = "
            f"{config.batch_size}, AdamW, weight decay {WEIGHT_DECAY:g}, {SCHEDULE}",
        ),
        (
            "learning rate",
            f"per setting: best validation accuracy among "
            f"{', '.join(f'{rate:g}' for rate in FIRST_RATES)} and further ones where the best "
            f"was on the edge; {len(TUNING_SEEDS)} seeds, used for nothing else",
        ),
        (
            "seeds",
            f"{seeds[0]} to {seeds[-1]}: each draws its own training and test images, wrong "
            "labels, initial network and order",
        ),
        ("micro-batch size in the verdict", "best mean validation accuracy, not test accuracy"),
        (
            "curves, norms and images",
            f"of {' and '.join(findings.names_with_curves)}, trained once more and watched",
        ),
        ("versions", _versions()),
        ("command", command(summary)),
    ]
    table = Table("what", "The demo", (), [[Cell(name), Cell(text)] for name, text in rows])
    return Section("what-was-run", "What was run", [table])


def _limits(summary: Summary) -> Section:
    text = (
        "A proof. It is a toy: small images, a small network, wrong labels of the simplest "
        f"kind, {summary.config.seeds} seeds. The intervals tell how much seeds scatter, not what "
        "other data would say, nor how lucky each setting was with its learning rate, which was "
        "chosen on two seeds. Choosing by clean validation labels is a luxury that noisy data "
        "seldom offers. And plain training with a well-chosen learning rate, which ends before "
        "wrong labels are learnt by heart, is a strong rival: on your data, compare at your own "
        "scale, with the learning rate tuned for both."
    )
    return Section("limits", "What this is not", [Paragraph(text)])


def command(summary: Summary) -> str:
    """Return the command that does this demo again."""
    config = summary.config
    sizes = " ".join(str(b) for b in config.microbatch_sizes)
    return (
        f"microclip demo --seeds {config.seeds} --steps {config.steps} --batch-size "
        f"{config.batch_size} --microbatch-sizes {sizes} --noise {config.noise:g}"
    )


def _versions() -> str:
    packages = ("microclip", "torch", "scikit-learn", "plotly")
    return ", ".join(
        [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)]
    )
