"""The demo's page: one HTML file that needs nothing else, for light and dark, wide and narrow."""

from __future__ import annotations

import base64
import platform
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.metadata import version

from microclip.demo import pictures
from microclip.demo.config import TEST_IMAGES, TRAINING_IMAGES, TUNING_SEEDS, VALIDATION_IMAGES
from microclip.demo.plan import FIRST_RATES
from microclip.demo.summary import Summary, percent, points, weights_sentence
from microclip.demo.train import HIDDEN, SCHEDULE, WEIGHT_DECAY

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --line: #d8dbe0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --paper: #16191d; --line: #3a4048; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 46rem; padding: 1.2rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.55 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.verdict { border-left: .3rem solid #0072b2; padding: .6rem 1rem; font-size: 1.1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line);
  text-align: left; white-space: nowrap; vertical-align: top; }
.text th, .text td { white-space: normal; } .text td { min-width: 12rem; }
figure { margin: 1.2rem 0; } img { width: 100%; height: auto; display: block; }
figcaption { margin-top: .5rem; }
"""

Drawing = Callable[[Summary, pictures.Theme], bytes]


def page(summary: Summary) -> str:
    """Return the whole page."""
    body = "\n".join(
        [
            "<h1>Digits with wrong labels, plain and with micro-batch clipping</h1>",
            f'<p class="verdict">{escape(summary.verdict)}</p>',
            _results(summary),
            _weights(summary),
            _rates(summary),
            _what_was_run(summary),
            _limits(summary),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>microclip demo</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _results(summary: Summary) -> str:
    caption = (
        "How to read it: above, each dot is the mean test accuracy at one micro-batch size, and "
        "the dashed line with its band is plain training; below, a bar that lies entirely above "
        "0 is a gain that the seeds agree on. At b = B clipping is plain training, so the right "
        "end must be exactly 0."
    )
    rows = [
        (
            row.name,
            f"{row.learning_rate:g}",
            percent(row.accuracy),
            "" if row.difference is None else points(row.difference),
        )
        for row in summary.rows
    ]
    headings = ("setting", "learning rate", "test accuracy, %", "points against plain")
    notes = "".join(f"<p>{escape(note)}</p>" for note in summary.notes)
    return (
        "<h2>Which micro-batch size?</h2>\n"
        + _figure(summary, pictures.sweet_spot, "Test accuracy against micro-batch size", caption)
        + _table(headings, rows)
        + "<p>In brackets: 95 % t-intervals over seeds. Differences are paired: the same images, "
        f"wrong labels, initial network and order for every setting of a seed.</p>{notes}"
    )


def _weights(summary: Summary) -> str:
    b = summary.config.watched
    caption = (
        f"How to read it: each bar is the mean weight of the micro-batches (b = {b}) with so many "
        "wrong labels in them, as a multiple of the mean weight in their step. The network was "
        f"never told which labels are wrong. {weights_sentence(summary.weights)}"
    )
    rows = [(str(w.wrong), f"{w.microbatches:,}", f"{w.weight:.2f}") for w in summary.weights]
    return (
        "<h2>Which data hurts?</h2>\n"
        + _figure(summary, pictures.weights, "Weight by number of wrong labels", caption)
        + _table(("wrong labels", "micro-batches", "mean weight"), rows)
    )


def _rates(summary: Summary) -> str:
    caption = (
        "How to read it: the validation accuracy of every learning rate that was tried, on the "
        "tuning seeds; the highest point of a line is the rate that its setting was then given. A "
        "line that stays high forgives a rate that is not quite right."
    )
    return "<h2>And the learning rate?</h2>\n" + _figure(
        summary, pictures.rates, "Validation accuracy against learning rate", caption
    )


def _what_was_run(summary: Summary) -> str:
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
        ("versions", _versions()),
        ("command", command(summary)),
    ]
    return "<h2>What was run</h2>\n" + _table((), rows, text=True)


def _limits(summary: Summary) -> str:
    return (
        "<h2>What this is not</h2>\n"
        "<p>A proof. It is a toy: small images, a small network, wrong labels of the simplest "
        f"kind, {summary.config.seeds} seeds. The intervals tell how much seeds scatter, not what "
        "other data would say, nor how lucky each setting was with its learning rate, which was "
        "chosen on two seeds. Choosing by clean validation labels is a luxury that noisy data "
        "seldom offers. And plain training with a well-chosen learning rate, which ends before "
        "wrong labels are learnt by heart, is a strong rival: on your data, compare at your own "
        "scale, with the learning rate tuned for both.</p>"
    )


def command(summary: Summary) -> str:
    """Return the command that does this demo again."""
    config = summary.config
    sizes = " ".join(str(b) for b in config.microbatch_sizes)
    return (
        f"microclip demo --seeds {config.seeds} --steps {config.steps} --batch-size "
        f"{config.batch_size} --microbatch-sizes {sizes} --noise {config.noise:g}"
    )


def _versions() -> str:
    packages = ("microclip", "torch", "scikit-learn", "matplotlib")
    return ", ".join(
        [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)]
    )


def _figure(summary: Summary, drawing: Drawing, alternative: str, caption: str) -> str:
    light, dark = (_inline(drawing(summary, t)) for t in (pictures.LIGHT, pictures.DARK))
    return (
        f'<figure>\n<picture>\n<source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
        f'<img src="{light}" alt="{escape(alternative)}">\n</picture>\n'
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>\n"
    )


def _inline(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], text: bool = False) -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    opening = '<table class="text">' if text else "<table>"
    lines = [
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(value)}</td>" for value in row[1:])
        + "</tr>"
        for row in rows
    ]
    return (
        f'<div class="scroll">{opening}\n'
        + (f"<thead><tr>{head}</tr></thead>\n" if headings else "")
        + "<tbody>\n"
        + "\n".join(lines)
        + "\n</tbody>\n</table></div>\n"
    )
