"""`microclip watch`: its options, and serving until Ctrl-C. Heavy imports wait until it runs, so
that `--help` is quick.
"""

from __future__ import annotations

import webbrowser
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WatchConfig:
    """Serve the page of a run on this machine, and renew it while training goes on.

    Prints the address of the page, which contains a secret: whoever has it and an account on this
    machine can see the page. It is the page of "microclip report", with the suspects to review.
    Nothing leaves the machine, and nothing else can be reached. Ctrl-C stops it.

    Watch a training run, and open its page:  microclip watch runs/first --open

    From another machine:  ssh -L 8477:127.0.0.1:8477 HOST, then the same address there
    """

    runs: tuple[Path, ...]
    """Folders of runs or ledgers."""
    port: int = 8477
    """Where to serve it; 0 for any free port. Browsers keep verdicts by port."""
    every: float = 15.0
    """The shortest time between two versions of the page, in seconds."""
    gallery: int = 60
    """How many of the most suspicious examples to show."""
    open: bool = False
    """Open the page in a browser."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("runs must name at least one folder: microclip watch RUN...")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, but got {self.port}.")
        if not 1 <= self.every < float("inf"):
            raise ValueError(f"every must be 1 second or more, but got {self.every:g}.")
        if not 0 <= self.gallery <= 1000:
            raise ValueError(f"gallery must be between 0 and 1000, but got {self.gallery}.")


def run(config: WatchConfig) -> None:
    """Serve the page until the user stops it."""
    from rich.console import Console

    from microclip.report.watch import LivePage, open_server

    console = Console()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False, highlight=False)

    try:
        page = LivePage(list(config.runs), config.gallery, config.every)
    except ValueError as error:
        raise SystemExit(f"microclip: {error}") from error
    server, note = open_server(page, config.port)
    with server:
        say(f"page: {server.url}")
        if note:
            say(note)
        say("Stop with Ctrl-C.")
        if config.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("Stopped.")
