"""The rest of the page: controls, tuning, errors in the paper, full scale, and every run."""

from __future__ import annotations

from microclip.report.blocks import Block, Cell, Paragraph, Section, Table
from microclip_lab.reproduction import errata, wording
from microclip_lab.reproduction.page_tables import SIZES, arms_table
from microclip_lab.reproduction.record_tables import BEST, LAST, Trial, View
from microclip_lab.reproduction.results import COMMAND, core_seconds, environments
from microclip_lab.reproduction.tasks import PLAIN
from microclip_lab.reproduction.theory_part import failing_statements
from microclip_lab.reproduction.verdicts import told

FINGERPRINT = 12  # characters to show


def controls(view: View) -> Section:
    """Return what else could explain a gain."""
    answers = {"holds": "yes", "does not hold": "no", "not looked at": wording.NOT_YET}
    rows = [
        [
            Cell(found.part.about),
            Cell(told(found.effect), marked=wording.excludes_zero(found.effect)),
            Cell(answers.get(found.verdict, "undecided")),
            Cell("-" if found.effect is None else wording.runs(found.effect.records)),
        ]
        for found in view.controls
    ]
    blocks: list[Block] = [
        Paragraph(
            "The gain of b = 4 on digits with wrong labels could have other causes: shorter "
            "steps, clipping of any kind, the number of micro-batches. Each row compares it with "
            "training that isolates one of these causes, tuned in the same way. Training without "
            "the wrong labels is the upper limit."
        ),
        Table(
            "controls",
            "Is clipping better than its alternative explanations?",
            ("comparison", "gain (95 % interval)", "better?", "runs"),
            rows,
            wide=True,
        ),
    ]
    for name in ("digits", "digits-sgd"):
        others = [row.arm.name for row in view.done(name)]
        arms = dict.fromkeys([PLAIN, *SIZES, *others])
        blocks.append(arms_table(view, name, list(arms), key="all"))
    return Section("controls", "Controls", blocks)


def tuning(view: View) -> Section:
    """Return which values were tried, and which one was taken."""
    rows = [
        [
            Cell(wording.named(task)),
            Cell(trial.arm),
            Cell(trial.tuned.replace("_", " ")),
            Cell(wording.number(trial.value), trial.value),
            Cell("diverged" if trial.score is None else f"{trial.score:.2f}", trial.score),
            Cell(_choice(trial), marked=trial.is_chosen),
            Cell(wording.runs(trial.records)),
        ]
        for task, trials in view.trials.items()
        for trial in trials
    ]
    said = Paragraph(
        "Every arm has one hyperparameter that is tuned on validation data, on seeds that are used "
        "for nothing else: its learning rate, or the bound it clips to. If the best value is at "
        "the edge of the grid, the grid grows, by a few values at most. Test data plays no part."
    )
    if not rows:
        return Section("tuning", "Tuning", [said, Paragraph("Not run yet.", "note")])
    edges = [
        f"{wording.named(task)} {trial.arm} ({wording.number(trial.value)})"
        for task, trials in view.trials.items()
        for trial in trials
        if trial.is_chosen and trial.at_edge
    ]
    beyond = "Arms whose best value is at the edge of the grid, so that a better "
    beyond += f"one may lie beyond: {wording.listed(edges) if edges else 'none'}."
    table = Table(
        "tuning",
        "Mean best validation figure by value, in %",
        ("task", "arm", "hyperparameter", "value", "score", "choice", "runs"),
        rows,
        (False, False, False, True, True, False, False),
        sortable=True,
        filterable=True,
        wide=True,
    )
    return Section("tuning", "Tuning", [said, Paragraph(beyond), table])


def _choice(trial: Trial) -> str:
    if not trial.is_chosen:
        return ""
    return "chosen, at the edge" if trial.at_edge else "chosen"


def wrong(view: View) -> Section:
    """Return what the paper gets wrong, and how that can be checked."""
    statements = [
        [
            Cell(claim.says),
            Cell(claim.where),
            Cell(wording.number(claim.left)),
            Cell({"<=": "≤", "==": "="}.get(claim.relation, claim.relation)),
            Cell(wording.number(claim.right)),
        ]
        for claim in failing_statements()
    ]
    others = [
        [Cell(remark.where), Cell(remark.what), Cell(remark.how_we_know)]
        for remark in errata.remarks(view.study, view.records)
    ]
    return Section(
        "wrong",
        "What the paper gets wrong, and how we know",
        [
            Paragraph(
                "The idea of the paper is good, and simple enough to be checked line by line; that "
                "is why this list exists. It is about proofs and tables, not about whether "
                "clipping works: see the verdicts for that. Everything here can be checked with "
                "microclip theory --claims, or with pencil and paper."
            ),
            Table(
                "statements",
                "Statements that fail: a counterexample to each, with both sides of the relation",
                ("statement", "where", "left", "claimed", "right"),
                statements,
                (False, False, True, False, True),
                wide=True,
            ),
            Table("remarks", "Other remarks", ("where", "what", "how we know"), others, wide=True),
        ],
    )


def full_scale(view: View) -> Section:
    """Return what the paper's own scale would take."""
    return Section(
        "full-scale",
        "What would be needed at full scale",
        [
            Paragraph(
                "Everything here is small: the models, the training times, and the data, which was "
                "chosen so that draggers are known. A verdict is about this scale; at another one, "
                "effects may be larger, smaller, or of opposite sign."
            ),
            Table(
                "full-scale-table",
                "The paper's experiments: in the paper, here, and what full scale would take",
                ("experiment", "in the paper", "here", "what it would take"),
                [
                    [Cell(one.what), Cell(one.there), Cell(one.here), Cell(one.needs)]
                    for one in errata.full_scale_experiments(view.study)
                ],
                wide=True,
            ),
        ],
    )


def how_to_repeat(view: View) -> Section:
    """Return how to repeat the runs, and their environments."""
    found = environments(view.records)
    names = [name for name in dict.fromkeys(n for kind in found for n in kind) if name != "runs"]
    hours = core_seconds(view.records) / 3600
    blocks: list[Block] = [
        Paragraph(
            f"Everything: {COMMAND}. To repeat one run and compare it with its record bit by bit: "
            "microclip reproduce --out results --again ID, with an id from any table of this page, "
            "or random. Page and results.json from existing records: microclip reproduce --out "
            "results --only-page. On the same class of machine with the same versions, figures and "
            "weights are identical to the last bit; elsewhere rounding may differ, which training "
            "can amplify."
        ),
        Paragraph(f"The runs took {hours:.1f} core-hours, with one thread per run."),
    ]
    if found:
        rows = [
            [Cell(name), *(Cell(str(kind.get(name, "-"))) for kind in found)]
            for name in [*names, "runs"]
        ]
        blocks.append(
            Table(
                "made-with",
                "Versions and machine classes of the runs",
                ("", *("value" for _ in found)),
                rows,
            )
        )
    return Section("again", "How to repeat it", blocks)


def every_run(view: View) -> Section:
    """Return all records by id."""
    rows = []
    for record in sorted(view.records.values(), key=lambda record: record.id):
        task = next((t for t in view.study.tasks if t.name == record.job.task), None)
        if task is None:
            continue
        headline = task.recipe.headline
        figures = [record.figure(prefix + headline) for prefix in ("best_validation_", BEST, LAST)]
        rows.append(
            [
                Cell(record.id),
                Cell(record.job.stage),
                *(
                    Cell("-" if f != f else f"{100 * f:.2f}", None if f != f else f)
                    for f in figures
                ),
                Cell("diverged" if record.diverged else "", marked=bool(record.diverged)),
                Cell(f"{record.made.get('seconds', 0):.0f}", record.made.get("seconds", 0)),
                Cell(record.weights[:FINGERPRINT] or "-"),
            ]
        )
    if not rows:
        return Section("every-run", "Every run", [Paragraph("Not run yet.", "note")])
    return Section(
        "every-run",
        "Every run",
        [
            Paragraph(
                "Each run has a file runs/ID.json next to this page, with all its settings. "
                "Figures are accuracies or WER in %.",
                "note",
            ),
            Table(
                "every-run-table",
                "Records by id",
                (
                    "id",
                    "stage",
                    "best validation",
                    "test, best checkpoint",
                    "test, last step",
                    "end",
                    "seconds",
                    "weights",
                ),
                rows,
                (False, False, True, True, True, False, True, False),
                sortable=True,
                filterable=True,
                sorted_by=0,
                wide=True,
            ),
        ],
    )
