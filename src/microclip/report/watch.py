"""`microclip watch`: serves the page of a run on this machine only, and renews it while training
goes on.

There are two answers, the page and whether there is a newer one; nothing is read from disk on
request. Everything else is refused: other methods, other hosts (a website may point its name at
127.0.0.1), and addresses without the token, which is new every time.
"""

from __future__ import annotations

import json
import os
import secrets
import socketserver
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import microclip
from microclip.report.blocks import Page
from microclip.report.folder import EXAMPLES, METRICS, RUN
from microclip.report.page import render
from microclip.report.runs import RunError, find_ledger
from microclip.report.write import assemble, default_title, read_findings

ADDRESS = "127.0.0.1"
IDLE = 10
SAFE = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True)
class Built:
    """A page that is ready to be sent."""

    version: int
    content: bytes
    problem: str = ""  # why there is no newer one
    is_empty: bool = False  # nothing has been recorded yet


class LivePage:
    """The page of some runs, built again when they have changed, but not all the time.

    Args:
        runs: Their folders.
        gallery: How many of the most suspicious examples to show.
        seconds: The shortest time between two pages.
        idle: How many times as long as it took to build a page to wait until the next one, so
            that training keeps the processor.
    """

    def __init__(
        self, runs: Sequence[Path], gallery: int, seconds: float, idle: float = IDLE
    ) -> None:
        for path in runs:
            if not path.is_dir():
                raise RunError(f"There is no run at {path}: it is not a folder.")
        self._runs, self._gallery, self._seconds, self._idle = runs, gallery, seconds, idle
        self._busy = threading.Lock()
        self._seen: object = None
        self._next = 0.0
        self.now = Built(0, b"")
        self._build()

    def renew(self) -> threading.Thread | None:
        """Build a new page in the background if something has changed and it is time to."""
        if time.monotonic() < self._next or _state(self._runs) == self._seen:
            return None
        builder = threading.Thread(target=self._build, daemon=True)
        builder.start()
        return builder

    def _build(self) -> None:
        if not self._busy.acquire(blocking=False):  # being built
            return
        try:
            began = time.monotonic()
            seen = _state(self._runs)
            self.now = self._built(self.now)
            self._seen = seen
            took = time.monotonic() - began
            self._next = time.monotonic() + max(self._seconds, self._idle * took)
        finally:
            self._busy.release()

    def _built(self, before: Built) -> Built:
        version = before.version + 1
        try:
            findings = read_findings(self._runs, self._gallery)
            page = assemble(findings, default_title(findings.runs))
            return Built(version, render(page, version))
        except (ValueError, OSError) as error:  # nothing recorded yet, or it is being restarted
            if before.content and not before.is_empty:
                return replace(before, problem=str(error))
            waiting = render(_waiting(self._runs, str(error)), version)
            return Built(version, waiting, is_empty=True)


def _waiting(runs: Sequence[Path], why: str) -> Page:
    return Page(
        title=f"microclip: {runs[0].resolve().name}",
        verdict=["There is nothing to show yet; this page looks again by itself.", why],
        sections=[],
        made_by=f"Made by microclip {microclip.__version__} with microclip watch.",
    )


def _state(runs: Sequence[Path]) -> list[Any]:
    """Return something that changes when a run does."""
    found: list[Any] = []
    for path in runs:
        ledger = find_ledger(path)
        parts = [] if ledger is None else sorted(ledger.glob("*/*.parquet"))
        for file in (path / RUN, path / METRICS, path / EXAMPLES, *parts):
            try:
                facts = file.stat()
            except OSError:
                continue
            found.append((str(file), facts.st_size, facts.st_mtime_ns))
    return found


class WatchServer(socketserver.ThreadingMixIn, HTTPServer):
    """Serves a page on the loopback interface; `url` is where.

    Args:
        page: What to serve.
        port: Where to; 0 for any port that is free.
    """

    daemon_threads = True

    def __init__(self, page: LivePage, port: int = 0) -> None:
        self.page = page
        self.token = secrets.token_urlsafe(24)
        super().__init__((ADDRESS, port), _Handler)

    def server_bind(self) -> None:
        """Bind, without asking a name server for the name of this machine."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about browsers that hang up half way."""

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    timeout = 20  # seconds for a browser to say what it wants

    def do_GET(self) -> None:
        if not self._is_asked_for_by_name():
            self._answer(403, b"This page is served to 127.0.0.1 only.\n")
            return
        _, token, *rest = [*self.path.split("?")[0].split("/"), ""]
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(404, b"There is nothing here without the token: use the whole address.\n")
        elif rest == ["", ""]:
            self._answer(200, self.server.page.now.content, "text/html; charset=utf-8")
        elif rest == ["version", ""]:
            self.server.page.renew()
            now = self.server.page.now
            content = json.dumps({"version": str(now.version), "problem": now.problem})
            self._answer(200, content.encode(), "application/json")
        else:
            self._answer(404, b"There is nothing here.\n")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is not GET, or not HTTP at all, without repeating it."""
        code = 405 if code == 501 else code
        self.close_connection = True
        self._answer(code, b"Only GET is answered here.\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: addresses contain the token."""

    def version_string(self) -> str:
        """Return the name of the server, without versions."""
        return "microclip"

    def _is_asked_for_by_name(self) -> bool:
        hosts = self.headers.get_all("Host") or []
        port = self.server.server_port
        return hosts in ([f"{ADDRESS}:{port}"], [f"localhost:{port}"])

    def _answer(self, code: int, content: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(code)
        if code == 405:
            self.send_header("Allow", "GET")
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            **SAFE,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def open_server(page: LivePage, port: int) -> tuple[WatchServer, str]:
    """Return a server at this port, or at any other if it is taken, and a note if so."""
    try:
        return WatchServer(page, port), ""
    except OSError as error:
        if not port:
            raise
        why = os.strerror(error.errno) if error.errno else str(error)
        server = WatchServer(page)
        return server, (
            f"Port {port} cannot be used ({why}), so this is port {server.server_port}. Browsers "
            "keep verdicts by port: to find those of an earlier review, free the port it was at."
        )
