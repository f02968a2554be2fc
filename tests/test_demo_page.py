"""What the demo shows: statistics, pictures, run folders, and all of it from end to end."""

import contextlib
import io
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import plotly.graph_objects as go
import pytest
from rich.console import Console

from microclip.cli import main
from microclip.demo import experiment, figures, folders, pictures
from microclip.demo.cache import Cache
from microclip.demo.data import load
from microclip.demo.folders import LEARNT, TEST, VALIDATION, write_folders
from microclip.demo.page import page
from microclip.demo.progress import Forecast, Lines, Status, progress
from microclip.demo.summary import (
    Estimate,
    Row,
    Weight,
    estimate,
    mean_weights,
    paired,
    percent,
    points,
    summarise,
    verdict,
    weights_sentence,
)
from microclip.demo.train import Result, Run, fit
from microclip.files import write_whole
from microclip.ledger import open_ledger
from microclip.report.assemble import investigate
from microclip.report.comparison import compare
from microclip.report.examples import read_examples
from microclip.report.page import render
from microclip.report.runs import read_run

from demo_runs import SHORT, SMALL, TRUTH, made_up

# ---------------------------------------------------------------------------------- statistics


def test_intervals_by_hand():
    found = estimate([1.0, 2.0, 3.0])  # deviation 1, t(2) = 4.3027, 4.3027 / sqrt(3) = 2.4841
    assert (found.mean, found.low, found.high) == pytest.approx((2, -0.4841, 4.4841), abs=1e-4)
    found = estimate([94.0, 96.0])  # deviation sqrt(2), t(1) = 12.7062
    assert (found.mean, found.low, found.high) == pytest.approx((95, 82.2938, 107.7062), abs=1e-4)


def test_pairing_removes_what_seeds_have_in_common():
    assert paired([11.0, 21.0, 91.0], [10.0, 20.0, 90.0]) == Estimate(1, 1, 1)
    with pytest.raises(ValueError, match="shorter"):
        paired([1.0, 2.0, 3.0], [1.0, 2.0])


def row(setting, difference=None, validation=90.0) -> Row:
    name = "plain training" if setting is None else f"b = {setting}"
    return Row(setting, name, 1e-3, Estimate(95, 94, 96), difference, validation)


@pytest.mark.parametrize(
    ("difference", "ending"),
    [
        (Estimate(0.6, 0.2, 1.0), "+0.60 (+0.20 to +1.00) points of test accuracy: clipping helps"),
        (Estimate(0.6, -0.2, 1.4), "no clear difference, the interval includes 0."),
        (Estimate(-0.6, -1.0, -0.2), "no b beats plain training here."),
    ],
)
def test_the_verdict_follows_from_the_numbers(difference, ending):
    rows = [row(None, validation=99), row(2, difference, 95), row(8, Estimate(9, 8, 10), 94)]
    sentence = verdict([*rows, row(32, Estimate(0, 0, 0), 99)], batch_size=32)
    assert sentence.startswith("Best on validation data: b = 2.")  # b = 8 is better on test data
    assert ending in sentence


def test_mean_weights_by_hand():
    results = [Result(0, 0, (6.0, 1.0, 0.0), (3, 2, 0)), Result(0, 0, (2.0, 2.0, 0.0), (1, 2, 0))]
    weights = mean_weights(results)
    assert weights == (Weight(0, 4, 2.0), Weight(1, 4, 0.75))
    assert "with 1 wrong got 0.38 times the weight of one with 0" in weights_sentence(weights)
    assert "nothing to compare" in weights_sentence(weights[:1])


def test_a_rate_at_the_end_of_the_ladder_is_noted():
    finished = made_up(SMALL, validation=lambda run: run.learning_rate)
    summary = summarise(SMALL, finished)
    assert len(summary.notes) == len(summary.rows)
    assert "learning rate of b = 4 is at the end of the ladder (1e-05 to 0.1)" in summary.notes[2]
    assert summarise(SMALL, made_up(SMALL, lambda run: -abs(run.learning_rate - 3e-3))).notes == ()


# -------------------------------------------------------------------------- progress, pictures


def test_a_log_gets_a_line_per_tenth_and_now_and_then_and_no_control_characters():
    file, now = io.StringIO(), [0.0]
    lines = Lines(Console(file=file), Forecast(lambda: now[0]))
    for now[0], done in ((0.0, 20), (30.0, 50), (33.0, 55), (60.0, 80), (700.0, 81), (701.0, 100)):
        lines.show(Status(done // 10, 10, done, 100))
    assert file.getvalue().splitlines() == [
        "20 % (2 of 10 runs)",
        "50 % (5 of 10 runs), about 0.8 min left",
        "80 % (8 of 10 runs), about 0.3 min left",
        "81 % (8 of 10 runs), about 3.6 min left",
        "100 % (10 of 10 runs)",
    ]


def test_a_terminal_gets_a_bar():
    file = io.StringIO()
    with progress(Console(file=file, force_terminal=True, width=120)) as report:
        report(Status(0, 2, 0, 10))
        report(Status(1, 2, 5, 10))
    assert "50 % (1 of 2 runs), about" in file.getvalue()


def test_pictures_differ_in_theme_and_bear_odd_numbers():
    # one setting far worse than the others, one far better, most without any scatter
    def accuracy(run: Run) -> float:
        return {2: 0.1, 4: 0.99}.get(run.setting or 0, 0.9) + 0.001 * run.seed

    config = replace(SMALL, microbatch_sizes=(1, 2, 4, 8, 16))
    summary = summarise(config, made_up(config, test=accuracy))
    light, dark = (pictures.sweet_spot(summary, t) for t in (pictures.LIGHT, pictures.DARK))
    assert light.startswith(b"\x89PNG")
    assert light != dark


@pytest.mark.parametrize("drawing", [figures.weights, figures.rates])
def test_figures_are_what_was_found(drawing):
    config = replace(SMALL, microbatch_sizes=(1, 2, 4, 8, 16))
    summary = summarise(config, made_up(config, lambda run: 0.5 + run.learning_rate))
    drawn = drawing(summary)
    text = json.dumps({"data": drawn.data, "layout": dict(drawn.layout)})
    found = go.Figure(json.loads(re.sub(r"var\(--[a-z0-9-]+\)", "#123456", text)))
    if drawing is figures.weights:
        assert list(found.data[0].y) == [weight.weight for weight in summary.weights]
    else:
        assert [t.name for t in found.data] == [
            "plain training",
            *(f"b = {b}" for b in (1, 2, 4, 8, 16)),
        ]
        assert dict(zip(found.data[0].x, found.data[0].y, strict=True)) == summary.tuning[None]


def test_the_page_escapes_what_it_is_given(watched):
    summary = summarise(SMALL, made_up(SMALL))
    hostile = replace(summary, verdict="<b> & 'c'", notes=("<script>alert(1)",))
    text = render(page(hostile, investigate(watched))).decode()
    assert "&lt;b&gt; &amp;" in text
    assert "&lt;script&gt;alert(1)" in text
    assert "<script>alert" not in text


# -------------------------------------------------------------------------------- run folders


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """The run folders of a small demo."""
    config = replace(SMALL, out=tmp_path_factory.mktemp("demo"), steps=40)
    return write_folders(config, made_up(config), "a command")


def test_runs_are_folders_that_the_report_compares(watched):
    runs = [read_run(path) for path in watched]
    assert [path.name for path in watched[:2]] == ["plain-seed-2", "b4-seed-2"]
    assert len(runs) == len(SMALL.settings) * SMALL.seeds
    (comparison,) = compare(runs)
    assert [s.microbatch_size for s in comparison.settings] == [None, 2, 4, 32]
    assert comparison.headline == TEST
    for run in runs:
        assert run.metrics[TEST] == {40: 50.0}  # what was found, whatever a watched one comes to
        assert (run.ledger is not None) == (run.path.name == "b4-seed-2")
        assert (len(run.metrics[VALIDATION]) == 4) == (run.path in watched[:2])
    assert list(runs[0].metrics[LEARNT]) == [10, 20, 30, 40]


def test_a_watched_run_is_the_run_itself(watched):
    rate = float(read_run(watched[1]).settings["learning rate"])
    run = replace(SHORT, setting=4, seed=2, steps=40, learning_rate=rate)
    model, _ = fit(run, load(2, 0.2))
    logged = read_run(watched[1]).metrics
    record = open_ledger(watched[1] / "ledger")
    assert (record.rows, record.steps) == (40 * 8, range(40))
    digits = load(2, 0.2)
    right = model(digits.training.pixels[digits.wrong]).argmax(1)
    given = digits.training.labels[digits.wrong]
    assert logged[LEARNT][40] == pytest.approx(100 * (right == given).double().mean().item())


def test_examples_know_their_labels_and_the_truth(watched):
    digits = load(2, 0.2)
    ids = {str(place) for place in digits.training.places.tolist()}
    found = read_examples(watched[1], ids, ids)
    assert found.facts.keys() == ids
    assert sum(bool(facts.wrong) for facts in found.facts.values()) == 180
    assert len(found.contents) == 120
    for one, given in zip(
        digits.training.places.tolist(), digits.training.labels.tolist(), strict=True
    ):
        assert found.facts[str(one)].label == str(given)
        assert found.facts[str(one)].truth == str(TRUTH[one].item())


def test_watched_runs_are_kept_and_others_written_anew(watched, monkeypatch):
    config = replace(SMALL, out=watched[0].parents[1], steps=40)
    monkeypatch.setattr(folders, "fit", lambda *_: pytest.fail("was trained again"))
    before = watched[1].stat().st_mtime_ns
    assert write_folders(config, made_up(config), "a command") == watched
    assert watched[1].stat().st_mtime_ns == before
    assert read_run(watched[-1]).metrics[TEST] == {40: 50.0}
    trained = []
    monkeypatch.setattr(folders, "_watch", lambda run, folder: trained.append(run.setting))
    other = replace(config, out=watched[0].parents[1] / "other")
    other.out.mkdir()
    write_folders(other, made_up(other), "a command")
    assert trained == [None, 4]
    (other.out / "runs" / "b2-seed-3" / "run.json").unlink()
    with pytest.raises(FileExistsError, match="b2-seed-3 is in the way"):
        write_folders(other, made_up(other), "a command")


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    write_whole(tmp_path / "page", b"first")
    write_whole(tmp_path / "page", b"second")
    assert (tmp_path / "page").read_bytes() == b"second"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_whole(tmp_path / "folder", b"third")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "page"]


# -------------------------------------------------------------------------------- all together


@contextlib.contextmanager
def here(processes: int):
    """A pool that runs in this process."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def nowhere(processes: int):
    raise AssertionError("nothing is left to be trained, but a pool was started")


def test_the_demo_from_end_to_end_and_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    command = "demo --seeds 2 --steps 10 --microbatch-sizes 2 4 --workers 2 --out some/where"
    cache = Cache(tmp_path / "some/where/runs.jsonl")
    cache.path.parent.mkdir(parents=True)
    for run, result in made_up(SMALL, test=lambda run: 2.0).items():
        cache.add(run, result)

    assert main([*command.split(), "--fresh"]) == 0
    printed, log = capsys.readouterr()
    finished = cache.load()
    assert all(result.test_accuracy <= 1 for result in finished.values())  # what was is forgotten
    summary = summarise(SMALL, finished)
    html = (tmp_path / "some/where/index.html").read_text(encoding="utf-8")
    assert (tmp_path / "some/where/sweet-spot.png").read_bytes().startswith(b"\x89PNG")
    assert printed.splitlines()[-2:] == [
        "page:    some/where/index.html",
        "picture: some/where/sweet-spot.png",
    ]
    for found in summary.rows:
        for value in (found.name, percent(found.accuracy), f"{found.learning_rate:g}"):
            assert value in printed
            assert value in html
        if found.difference is not None:
            assert points(found.difference) in printed
            assert points(found.difference) in html
    assert [row.name for row in summary.rows] == ["plain training", "b = 2", "b = 4", "b = 32 = B"]
    assert summary.rows[-1].difference == Estimate(0, 0, 0)
    assert summary.verdict in " ".join(printed.split())
    assert summary.verdict in html
    assert sum(weight.microbatches for weight in summary.weights) == 2 * 10 * 8
    own = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)  # plotly's code aside
    assert not re.search(r'(src|href|srcset)="(?!data:|#)', own)  # the page needs no other file
    assert own.count("data:image/png") == 60  # the gallery
    assert "default-src &#39;none&#39;" in own
    assert "prefers-color-scheme: dark" in own
    assert len(html.encode()) < 8_000_000
    for sentence in (
        "wrong label; nobody had told which",
        "In brackets: 95 % t-intervals",
        "A proof.",
    ):
        assert sentence in own
    assert "\x1b" not in printed + log
    assert f"100 % ({len(finished)} of {len(finished)} runs)" in log

    # again: everything comes from the cache
    monkeypatch.setattr(experiment, "_pool", nowhere)
    assert main(command.split()) == 0
    assert capsys.readouterr().out == printed

    # the last line was cut off: that run, and no other, is done again, and comes out the same
    cache.path.write_bytes(cache.path.read_bytes()[:-10])
    assert len(cache.load()) == len(finished) - 1
    monkeypatch.setattr(experiment, "_pool", here)
    assert main(command.split()) == 0
    assert capsys.readouterr().out == printed
    assert cache.load() == finished
    assert len(cache.path.read_text().splitlines()) == len(finished) + 1
