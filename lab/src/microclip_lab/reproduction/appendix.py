"""The rest of the page: controls, tuning, what the paper gets wrong, full scale, and every run."""

from __future__ import annotations

from microclip.report.blocks import Block, Cell, Paragraph, Section, Table
from microclip_lab.reproduction import errata, wording
from microclip_lab.reproduction.page_tables import SIZES, arms_table
from microclip_lab.reproduction.record_tables import BEST, LAST, Trial, View
from microclip_lab.reproduction.results import COMMAND, core_seconds, environments
from microclip_lab.reproduction.tasks import PLAIN
from microclip_lab.reproduction.theory_part import failing_statements
from microclip_lab.reproduction.verdicts import told

FINGERPRINT = 12  # characters of it that are shown


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
            "Whatever b = 4 gains on digits with wrong labels could have another reason: shorter "
            "steps, clipping of any kind, the number of micro-batches. Each row compares it with a "
            "way to train that has that reason and not the other, tuned in the same way. Training "
            "without the wrong labels is the most that could be hoped for."
        ),
        Table(
            "controls",
            "Is clipping better than what could explain it?",
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
        "Every arm has one number that is chosen on validation data, on seeds that are used for "
        "nothing else: its learning rate, or the bound it clips to. If the best is the first or "
        "the last one tried, the grid grows, by a few values at most. Test data plays no part."
    )
    if not rows:
        return Section("tuning", "Tuning", [said, Paragraph("Not run yet.", "note")])
    edges = [
        f"{wording.named(task)} {trial.arm} ({wording.number(trial.value)})"
        for task, trials in view.trials.items()
        for trial in trials
        if trial.is_chosen and trial.at_edge
    ]
    beyond = (
        "Arms whose best value is the smallest or the largest that was tried, so that a better "
    )
    beyond += f"one may lie beyond: {wording.listed(edges) if edges else 'none'}."
    table = Table(
        "tuning",
        "Mean best validation figure by value, in %",
        ("task", "arm", "number", "value", "score", "choice", "runs"),
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
    return "taken, at the edge" if trial.at_edge else "taken"


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
                "The idea of the paper is a good one, and simple enough to be checked line by "
                "line; that is the reason why this list could be made. It is about proofs and "
                "tables, and says nothing of whether clipping works: that is what the verdicts are "
                "for. All of it can be checked with microclip theory --claims, or "
                "with pencil and paper."
            ),
            Table(
                "statements",
                "Statements that fail: an instance of each, with both sides of what is claimed",
                ("it is stated that", "where", "left", "claimed", "right"),
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
                "Everything here is small: the models, the minutes they train, and the data, made "
                "or taken so that draggers are known. A verdict is about this scale; at another "
                "one effects may be larger, smaller, or of the other sign."
            ),
            Table(
                "full-scale-table",
                "The paper's experiments, there, here, and what they would take",
                ("experiment", "there", "here", "what it would take"),
                [
                    [Cell(one.what), Cell(one.there), Cell(one.here), Cell(one.needs)]
                    for one in errata.full_scale_experiments(view.study)
                ],
                wide=True,
            ),
        ],
    )


def again(view: View) -> Section:
    """Return how to do it again, and what it was done with."""
    found = environments(view.records)
    names = [name for name in dict.fromkeys(n for kind in found for n in kind) if name != "runs"]
    hours = core_seconds(view.records) / 3600
    blocks: list[Block] = [
        Paragraph(
            f"All of it: {COMMAND}. One run again, compared with its record bit by bit: microclip "
            "reproduce --out results --again ID, with an id from any table of this page, or "
            "random. Page and results.json from the records alone: microclip reproduce --out "
            "results --only-page. On the same class of machine with the same versions, figures and "
            "weights come out the same to the last bit; elsewhere they may differ in rounding, "
            "which training can amplify."
        ),
        Paragraph(f"The runs took {hours:.1f} hours on one core each, one thread per run."),
    ]
    if found:
        rows = [
            [Cell(name), *(Cell(str(kind.get(name, "-"))) for kind in found)]
            for name in [*names, "runs"]
        ]
        blocks.append(
            Table(
                "made-with",
                "Versions and classes of machines that runs were done with",
                ("", *("with" for _ in found)),
                rows,
            )
        )
    return Section("again", "How to do it again", blocks)


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
                "Each has a file of its own, runs/ID.json beside this page, with everything it was "
                "done with. Figures are accuracies or WER in %.",
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
