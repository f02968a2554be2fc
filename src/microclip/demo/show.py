"""The demo from beginning to end."""

from __future__ import annotations

from rich.console import Console

from microclip.demo.cache import Cache
from microclip.demo.config import TRAINING_IMAGES, DemoConfig
from microclip.demo.experiment import carry_out_all
from microclip.demo.folders import write_folders
from microclip.demo.page import command, page
from microclip.demo.pictures import LIGHT, sweet_spot
from microclip.demo.progress import progress
from microclip.demo.summary import Summary, summarise
from microclip.demo.tables import print_summary
from microclip.files import write_whole
from microclip.report.assemble import investigate
from microclip.report.page import render


def show(config: DemoConfig) -> Summary:
    """Train, print the results, write the picture and the page."""
    # results to standard output, progress to standard error: one can be redirected alone
    console, log = Console(), Console(stderr=True)
    config.out.mkdir(parents=True, exist_ok=True)
    cache = Cache(config.out / "runs.jsonl")
    if config.fresh:
        cache.clear()
    log.print(
        f"{TRAINING_IMAGES} training images, {round(config.noise * TRAINING_IMAGES)} of them with "
        f"a wrong label; {len(config.settings)} settings, {config.processes} at a time. "
        "Ctrl-C is safe: what is finished is kept.",
        soft_wrap=True,
        highlight=False,
    )
    with progress(log) as report:
        finished = carry_out_all(config, cache, report)
    summary = summarise(config, finished)
    picture, web_page = config.out / "sweet-spot.png", config.out / "index.html"
    write_whole(picture, sweet_spot(summary, LIGHT))
    findings = investigate(write_folders(config, finished, command(summary)))
    write_whole(web_page, render(page(summary, findings)))
    print_summary(summary, console)
    console.print()
    for what, path in (("page", web_page), ("picture", picture)):
        # soft_wrap and no markup: a path must come out as it is, however long or odd
        console.print(f"{what + ':':<9}{path}", soft_wrap=True, markup=False, highlight=False)
    return summary
