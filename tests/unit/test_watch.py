"""`microclip watch`: the page of a run that is still training, served to this machine only."""

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from review_runs import record, recorded

from microclip.cli import main
from microclip.report import RunFolder
from microclip.report.runs import RunError
from microclip.report.watch import LivePage, WatchServer, open_server

from browsers import HOSTILE, chromium, needs_a_browser
from report_runs import described


@contextmanager
def serving(page):
    with WatchServer(page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "secret.txt").write_text("secret")
    with serving(LivePage([described(folder / "run").path], 4, 0)) as found:
        yield found


def ask(server, path, method="GET", hosts=None):
    """Return status, headers and content; `hosts` replaces the Host header."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest(method, path, skip_host=hosts is not None)
    for host in hosts or ():
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def test_the_page_and_its_version(server):
    path = urlsplit(server.url).path
    status, headers, content = ask(server, path)
    assert status == 200
    assert content.startswith(b"<!doctype html>")
    assert b'data-version="1"' in content
    assert b"connect-src &#39;self&#39;" in content
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Frame-Options"] == "DENY"
    assert not any(name.lower().startswith("access-control") for name in headers)
    assert headers["Server"] == "microclip"
    status, headers, content = ask(server, f"{path}version")
    assert (status, content) == (200, b'{"version": "1", "problem": ""}')
    assert not any(name.lower().startswith("access-control") for name in headers)


def test_it_listens_to_this_machine_only(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert len(server.token) >= 32


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        ["evil.example"],
        ["evil.example:{port}"],
        ["127.0.0.1"],
        ["127.0.0.1:1"],
        ["127.0.0.1:{port}.evil.example"],
        ["127.0.0.1:{port}", "evil.example"],
        ["[::1]:{port}"],
        [""],
    ],
)
def test_other_hosts_are_refused(server, hosts):
    hosts = [host.format(port=server.server_port) for host in hosts]
    status, _, content = ask(server, urlsplit(server.url).path, hosts=hosts)
    assert status == 403
    assert b"digit" not in content
    assert server.token.encode() not in content


def test_localhost_is_this_machine(server):
    hosts = [f"localhost:{server.server_port}"]
    assert ask(server, urlsplit(server.url).path, hosts=hosts)[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/version",
        "/x/",
        "//",
        "/{token}",
        "/{half}/",
        "/{token}x/",
        "/{token}/../secret.txt",
        "/{token}/run.json",
        "/{token}//",
        "/{token}/version/",
        "/{token}/%2e%2e/secret.txt",
        "/{token}/../../../../etc/passwd",
        "/{upper}/",
        "/é/",
        "*",
        "http://127.0.0.1/{token}/",
    ],
)
def test_nothing_else_can_be_reached(server, path):
    token = server.token
    asked = path.format(token=token, half=token[:16], upper=token.swapcase())
    request = f"GET {asked} HTTP/1.0\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n"
    status, content = raw(server, request.encode())
    assert status == 404
    assert b"secret" not in content
    assert token.encode() not in content


def raw(server, request):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
        connection.sendall(request)
        content = b"".join(iter(lambda: connection.recv(65536), b""))
    return int(content.split(b" ", 2)[1]), content


@pytest.mark.parametrize("method", ["POST", "PUT", "HEAD", "DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_only_get_is_answered(server, method):
    status, headers, content = ask(server, urlsplit(server.url).path, method)
    assert status == 405
    assert headers["Allow"] == "GET"
    assert b"doctype" not in content


@pytest.mark.parametrize(
    "request_", [b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\xff\r\n\r\n"]
)
def test_what_is_not_http_is_refused(server, request_):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
        connection.sendall(request_)
        content = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"doctype" not in content
    assert ask(server, urlsplit(server.url).path)[0] == 200  # and the server goes on


def renewed(page):
    builder = page.renew()
    assert builder is not None
    builder.join(60)
    return page.now


class TestAGrowingRun:
    def test_it_waits_for_the_first_step_then_shows_what_is_there(self, tmp_path):
        run = RunFolder(tmp_path / "run", name="three classes")
        page = LivePage([run.path], 10, 0, idle=0)
        assert b"There is nothing to show yet" in page.now.content
        assert b"is empty: it has no ledger" in page.now.content
        assert page.renew() is None  # nothing has changed
        run.log(1, accuracy=0.5)
        now = renewed(page)
        assert now.version == 2
        assert b"There is nothing to show yet" not in now.content
        assert b'<h1 class="data">microclip: three classes</h1>' in now.content
        record(run, epochs=6)
        now = renewed(page)
        assert (now.version, now.problem) == (3, "")
        assert b"labels look wrong" in now.content
        assert page.renew() is None

    def test_a_ledger_that_is_being_written(self, tmp_path):
        from microclip import Ledger

        run = recorded(tmp_path / "run")
        parts = sorted((run.ledger / "microbatches").iterdir())
        half = parts[0].read_bytes()[:100]
        (run.ledger / "microbatches" / ".0123.tmp").write_bytes(half)
        with Ledger(run.ledger) as ledger:
            ledger.record([0, 1], [0.5, 0.5], step=36)  # not on disk yet
            page = LivePage([run.path], 10, 0)
            assert b"labels look wrong" in page.now.content
            assert page.now.problem == ""

    def test_a_page_stays_while_there_is_none_that_is_newer(self, tmp_path):
        run = recorded(tmp_path / "run")
        page = LivePage([run.path], 10, 0, idle=0)
        before = page.now
        (run.path / "run.json").write_text("{")
        now = renewed(page)
        assert (now.version, now.content) == (before.version, before.content)
        assert "run.json is damaged" in now.problem

    def test_it_does_not_take_the_processor_from_training(self, tmp_path):
        run = recorded(tmp_path / "run")
        page = LivePage([run.path], 10, 3600)
        run.log(2, accuracy=0.6)
        assert page.renew() is None  # too early

    def test_folders_that_are_not_there(self, tmp_path):
        with pytest.raises(RunError, match="There is no run at .*none: it is not a folder"):
            LivePage([tmp_path / "none"], 10, 0)


class TestTheCommand:
    def test_it_serves_until_it_is_interrupted(self, tmp_path):
        run = described(tmp_path / "run").path
        command = [sys.executable, "-m", "microclip", "watch", str(run), "--port", "0"]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # as in a terminal: a shell makes what it starts in the background ignore Ctrl-C
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            line = process.stdout.readline()
            assert re.fullmatch(r"page: http://127\.0\.0\.1:\d+/[\w-]{32}/\n", line), line
            address = urlsplit(line.split()[1])
            connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=30)
            connection.request("GET", address.path)
            assert connection.getresponse().read().startswith(b"<!doctype html>")
            connection.close()
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=30)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 0
        assert out.splitlines()[-1] == "Stopped."
        assert errors == ""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["none"], "There is no run at none: it is not a folder."),
            (["none", "--port", "70000"], "port must be between 0 and 65535, but got 70000."),
            (["none", "--every", "0"], "every must be 1 second or more, but got 0."),
            (["none", "--gallery", "-1"], "gallery must be between 0 and 1000, but got -1."),
        ],
    )
    def test_mistakes(self, arguments, message, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as error:
            main(["watch", *arguments])
        shown = str(error.value) + " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert message in shown

    def test_a_port_that_is_taken(self, server):
        other, note = open_server(server.page, server.server_port)
        with other:
            assert other.server_port != server.server_port
            assert note.startswith(f"Port {server.server_port} cannot be used ({os.strerror(98)})")


@needs_a_browser
@pytest.mark.full
class TestInABrowser:
    def test_it_renews_itself_and_keeps_the_review(self, tmp_path):
        run = recorded(tmp_path / "run", epochs=5)
        with serving(LivePage([run.path], 10, 0, idle=0)) as server, chromium() as browser:
            page = browser.new_page()
            complaints = []
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.goto(server.url)
            page.keyboard.press("j")
            page.keyboard.press("3")
            done = page.locator("[data-progress]").inner_text()
            assert done.startswith("1 of")
            record(run, epochs=2, first=5)
            page.locator("html[data-version='2']").wait_for(timeout=60000)
            page.locator(".suspect").first.wait_for()
            assert page.locator("[data-progress]").inner_text().startswith("1 of")
            assert "42 steps" in page.locator(".verdict").inner_text()
            assert complaints == []

    def test_while_someone_types_it_only_says_so(self, tmp_path):
        run = recorded(tmp_path / "run")
        with serving(LivePage([run.path], 10, 0, idle=0)) as server, chromium() as browser:
            page = browser.new_page()
            page.goto(server.url)
            page.locator("[data-filter=words]").fill("example")
            run.log(2, accuracy=0.6)
            page.get_by_text("There are new results.").wait_for(timeout=60000)
            assert page.evaluate("document.documentElement.dataset.version") == "1"
            page.get_by_role("button", name="Show").click()
            page.locator("html[data-version='2']").wait_for(timeout=60000)
            page.locator(".suspect").first.wait_for()
            assert page.locator("[data-filter=words]").input_value() == "example"

    def test_it_says_that_it_has_stopped(self, tmp_path):
        run = recorded(tmp_path / "run")
        with chromium() as browser:
            page = browser.new_page()
            with serving(LivePage([run.path], 10, 0)) as server:
                page.goto(server.url)
            page.get_by_text("microclip watch has stopped").wait_for(timeout=60000)

    def test_other_names_other_sites_and_no_token(self, tmp_path):
        run = recorded(tmp_path / "run", text=HOSTILE)
        rebound = "--host-resolver-rules=MAP evil.example 127.0.0.1"
        with serving(LivePage([run.path], 10, 0)) as server, chromium(rebound) as browser:
            page = browser.new_page()
            assert page.goto(server.url).status == 200
            assert page.evaluate("window.pwned") is None
            assert page.goto(server.url.replace("127.0.0.1", "localhost")).status == 200
            assert page.goto(server.url.replace("127.0.0.1", "evil.example")).status == 403
            assert page.goto(server.url.replace(server.token, "")).status == 404
            assert page.goto(server.url.replace(server.token, "x" * 32)).status == 404
            page.goto("about:blank")
            script = f"fetch('{server.url}version').then(r => r.text(), e => 'refused')"
            assert page.evaluate(script) == "refused"  # no other site may read it
