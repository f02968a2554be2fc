"""`microclip apply`: its options, and writing the lists. Heavy imports wait until it runs, so that
`--help` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from microclip.review import Review


@dataclass(frozen=True)
class ApplyConfig:
    """Turn a review into lists to train by: ids to keep, ids to drop, new labels.

    A review is what the page of "microclip report" or "microclip watch" exports, as CSV or JSON, or
    a CSV file of your own with the columns id, verdict (keep, relabel or drop) and label. Examples
    without a verdict are kept.

    Check it against its run, and write the lists:
      microclip apply review-digits.csv --run runs/digits --out cleaned

    As Parquet files:  microclip apply review-digits.json --run runs/digits --format parquet
    """

    review: Path
    """The exported file."""
    run: Path | None = None
    """The folder of the run or ledger. Needed for the list of ids to keep."""
    out: Path = Path("reviewed")
    """The folder to write to: keep.txt, drop.txt and relabel.csv."""
    format: Literal["text", "json", "parquet"] = "text"
    """The format of the lists; text is an id per line, and CSV for the new labels."""


def run(config: ApplyConfig) -> Review:
    """Check the review, write the lists, and print what they are."""
    from rich.console import Console

    from microclip.review import read_review

    console = Console()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False, highlight=False)

    try:
        review = read_review(config.review, config.run)
        before = list(config.out.glob("keep.*"))
        files = review.write(config.out, config.format)
    except ValueError as error:
        raise SystemExit(f"microclip: {error}") from error
    counts = (f"{review.count(verdict):,} {verdict}" for verdict in ("keep", "relabel", "drop"))
    say(f"{len(review):,} verdicts: {', '.join(counts)}.")
    if review.run_ids is None:
        say("Without --run, the ids of the other examples are unknown: there is no list to keep.")
        for old in before:
            if not old.exists():
                say(f"{old}, which was that of an earlier review, was removed.")
    else:
        kept = len(review.run_ids) - review.count("drop")
        say(f"{kept:,} of {len(review.run_ids):,} examples are left.")
    for file in files:
        say(str(file))
    return review
