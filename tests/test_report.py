"""Run folders, what is read of them, what is said of them, and what is refused."""

import base64
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
from scipy.special import stdtrit

import microclip
from microclip.cli import main
from microclip.report import RunFolder
from microclip.report.assemble import assemble, investigate
from microclip.report.blocks import Figure, Gallery, Page, Paragraph, Section, Table
from microclip.report.comparison import Comparison, compare, lower_is_better, verdict
from microclip.report.course import follow
from microclip.report.examples import read_examples
from microclip.report.figures import histogram, thinned
from microclip.report.media import LARGEST_FILE, LeftOutError, Room
from microclip.report.page import LARGEST_PAGE, embedded, render
from microclip.report.png import png
from microclip.report.runs import RunError, read_run
from microclip.report.statistics import Estimate, estimate, t_quantile
from microclip.report.write import write_page, write_report

import ledgers
from report_runs import EXAMPLES, described, ledger, sweep, tone

HOSTILE = "<script>window.pwned=1</script><img src=x onerror=alert(1)>\"'`${1}&amp;{{7*7}}\u2028"


def blocks(page: Page, kind: type) -> list:
    return [b for section in page.sections for b in section.blocks if isinstance(b, kind)]


def page_of(*paths: Path, gallery: int = 60) -> Page:
    return assemble(investigate(list(paths), gallery), "A title")


def said(page: Page) -> str:
    return "\n".join([*page.verdict, *(block.text for block in blocks(page, Paragraph))])


# ------------------------------------------------------------------------------- writing folders


def test_what_is_written_is_what_is_read(tmp_path):
    run = RunFolder(
        tmp_path / "one",
        name="The first",
        microbatch_size=4,
        seed=7,
        group="g",
        settings={"lr": 0.1, "net": {"layers": [1, 2], "name": "tiny"}},
        command="python train.py",
        headline="score",
    )
    run.log(10, loss=0.5)
    run.log(20, loss=np.float32(0.25), score=3)
    found = read_run(run.path)
    assert (found.name, found.microbatch_size, found.seed, found.group) == ("The first", 4, 7, "g")
    assert found.settings == {"lr": "0.1", "net.layers": "[1, 2]", "net.name": "tiny"}
    assert found.metrics == {"loss": {10: 0.5, 20: 0.25}, "score": {20: 3.0}}
    assert (found.command, found.headline) == ("python train.py", "score")
    assert found.versions.keys() == {"python", "torch", "microclip"}
    assert found.notes == ()
    assert sorted(path.name for path in run.path.iterdir()) == ["metrics.jsonl", "run.json"]


def test_a_run_that_goes_back_replaces_what_came_after(tmp_path):
    run = RunFolder(tmp_path)
    for step in (10, 20, 30):
        run.log(step, loss=step)
    again = RunFolder(tmp_path)
    again.log(20, loss=0.5)
    again.log(15, other=1)  # out of order, which is nobody's fault
    assert read_run(tmp_path).metrics == {"loss": {10: 10.0, 20: 0.5}, "other": {15: 1.0}}


def test_a_torn_line_is_ignored_and_what_comes_after_it_is_not_lost(tmp_path):
    run = RunFolder(tmp_path)
    run.log(1, loss=1)
    metrics = tmp_path / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 2, "lo')
    assert read_run(tmp_path).metrics == {"loss": {1: 1.0}}
    assert read_run(tmp_path).notes == ()  # it may be half written just now
    run.log(3, loss=3)
    found = read_run(tmp_path)
    assert found.metrics == {"loss": {1: 1.0, 3: 3.0}}
    assert found.notes == (
        "1 lines of metrics.jsonl are no metrics of a step, and were passed over.",
    )


def test_odd_metrics_are_passed_over(tmp_path):
    run = RunFolder(tmp_path)
    run.log(0, loss=float("nan"), other=float("inf"), good=1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for line in (
            '{"step": 1, "good": true, "text": "no", "list": [1], "big": 1e999}',
            "[]",
            "7",
        ):
            file.write(line + "\n")
        file.write('{"step": "2", "good": 5}\n{"good": 6}\n{"step": 3, "good": NaN}\n')
        file.write('{"step": 4, "good": ' + "9" * 400 + "}\n")
        file.write("[" * 100_000 + "\n")
    found = read_run(tmp_path)
    assert found.metrics == {"good": {0: 1.0}}
    assert "5 lines" in found.notes[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.log(-1, loss=1), "step must be 0 or a positive integer, but got -1."),
        (lambda run: run.log_all(1, {"step": 1}), "cannot be called step"),
        (lambda run: run.example(1, text="a", image=b"b"), "was given image and text"),
        (lambda run: run.example(1, image=np.zeros((2, 2, 2))), "but got one of shape (2, 2, 2)."),
        (lambda run: RunFolder(run.path, microbatch_size=0), "but got 0."),
    ],
)
def test_writers_refuse_with_the_value(call, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(RunFolder(tmp_path))


def test_files_of_examples_have_harmless_names(tmp_path):
    run = RunFolder(tmp_path / "run")
    ids = ["../../evil", "/etc/passwd", "a/b", "", ".", "..", "x" * 500, "nul\0", 17, "\ud800"]
    for one in ids:
        run.example(one, image=np.zeros((2, 2)))
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.is_relative_to(run.path) for path in written)
    names = [path.name for path in (run.path / "examples").iterdir()]
    assert len(names) == len(ids)
    assert "17.png" in names
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+\.png", name) for name in names)


def test_pictures_are_what_was_drawn():
    matplotlib = pytest.importorskip("matplotlib.image")
    import io

    grey = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    back = matplotlib.imread(io.BytesIO(png(grey)))
    assert np.allclose(back * 255, grey)
    colours = np.random.default_rng(0).random((4, 5, 3))
    back = matplotlib.imread(io.BytesIO(png(colours)))
    assert np.abs(back[..., :3] - colours).max() < 0.5 / 255 + 1e-6
    assert png([[2.0, -1.0, float("nan")]]) == png([[255, 0, 0]])


# ----------------------------------------------------------------------------- reading, refusing


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("[]", 'does not say "format": "microclip-run"'),
        ('{"format": "other"}', 'does not say "format": "microclip-run"'),
        ('{"format": "microclip-run", "version": 2}', "is of version 2, but this microclip reads"),
        (
            '{"format": "microclip-run", "version": 1, "microbatch_size": "4"}',
            'must say a positive microbatch_size, or null for plain training, but says "4".',
        ),
        ('{"format": "microclip-run", "version": 1}', "is empty: it has no ledger, and no metric"),
        (" " * 16_000_001, "is longer than 16,000,000 bytes"),
    ],
)
def test_a_run_that_cannot_be_read_is_an_error(content, message, tmp_path, capsys):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunError, match=re.escape(message)):
        read_run(tmp_path)
    output = tmp_path / "page.html"
    with pytest.raises(SystemExit) as exit_:
        main(["report", str(tmp_path), "--output", str(output)])
    assert message in exit_.value.code  # printed, with exit code 1
    assert str(exit_.value.code).startswith("microclip: ")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_folders_that_are_no_runs(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("nowhere", "the folder does not exist"),
        ("file", "A run is a folder, but"),
        ("empty", "it has neither a run.json nor a ledger"),
    ):
        with pytest.raises(RunError, match=message):
            read_run(tmp_path / name)


def test_ledgers_that_are_not_all_there(tmp_path):
    path = ledger(tmp_path / "ledger")
    part = next((path / "examples").glob("*.parquet"))
    moved = part.rename(tmp_path / "aside")
    with pytest.raises(ValueError, match="A part of the ledger .* was deleted"):
        investigate([path])
    moved.rename(part)
    assert investigate([path]).dossiers
    said_by_manifest = json.loads((path / "ledger.json").read_text())
    (path / "ledger.json").write_text(json.dumps(said_by_manifest | {"version": 9}))
    with pytest.raises(ValueError, match="is of version 9"):
        investigate([path])
    (path / "ledger.json").unlink()
    with pytest.raises(ValueError, match=r"ledger.json is missing"):
        investigate([path])


def test_an_empty_ledger_is_noted_beside_metrics_and_an_error_alone(tmp_path):
    run = RunFolder(tmp_path / "run")
    microclip.Ledger(run.ledger).close()
    with pytest.raises(ValueError, match="is empty: no step has been written yet"):
        investigate([run.path])
    run.log(1, loss=1)
    assert "Its ledger is empty" in said(page_of(run.path))


def test_a_bare_ledger_is_a_run(tmp_path):
    path = ledger(tmp_path / "some run" / "ledger")
    for given in (path, path.parent):
        page = page_of(given)
        assert read_run(given).name == "some run"
        assert [section.title for section in page.sections] == [
            "Learning curves",
            "What clipping did",
            "Who is suppressed?",
            "Who drags?",
            "Scores",
            "What was run",
        ]
        assert "there is a ledger, and no run.json" in said(page)
        assert "the losses are those of the ledger" in said(page)


# --------------------------------------------------------------------------- examples and media


def test_unknown_ids_are_noted(tmp_path):
    run = described(tmp_path / "run")
    run.example("9999", text="?")
    with (run.path / "examples.jsonl").open("a") as file:
        file.write('{"id": null}\n{"id": [1]}\nnonsense\n{"id": 1, "kind": "text"')
    page = page_of(run.path)
    assert "1 ids in examples.jsonl are not in the ledger, for instance '9999'" in said(page)
    assert "3 lines of examples.jsonl describe no example" in said(page)


def test_the_last_word_on_an_example_counts(tmp_path):
    run = RunFolder(tmp_path)
    run.example(1, text="first", label="a")
    run.example(1, text="second", label="b", truth="c")
    found = read_examples(tmp_path, {"1"}, {"1"})
    assert found.contents["1"].text == "second"
    assert found.facts["1"].wrong
    run.example(1, label="b")
    found = read_examples(tmp_path, {"1"}, {"1"})
    assert found.contents == {}
    assert found.facts["1"].wrong is None


@pytest.mark.skipif(os.name != "posix", reason="makes links and pipes")
def test_nothing_outside_the_run_is_read(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    secret = tmp_path / "secret.png"
    secret.write_bytes(png([[1]]))
    (run / "inside.png").write_bytes(png([[2]]))
    (run / "link.png").symlink_to(secret)
    (run / "folder").symlink_to(tmp_path)
    (run / "round").symlink_to("round")
    (run / "fine.png").symlink_to("inside.png")
    os.mkfifo(run / "pipe")
    room = Room(10_000)
    for name in (
        "../secret.png",
        str(secret),
        "link.png",
        "folder/secret.png",
        "round",
        "pipe",
        "nul\0",
        "",
        ".",
        "missing.png",
        "x" * 5000,
        "/dev/zero",
        "folder/../../secret.png",
        "file:///etc/passwd",
    ):
        with pytest.raises(LeftOutError):
            room.embed(run, name, "image")
    assert room.left == 10_000
    for name in ("inside.png", "fine.png", "./inside.png"):
        uri = room.embed(run, name, "image").uri
        assert base64.b64decode(uri.split(",")[1]) == png([[2]])
    for name in ("run.json", "metrics.jsonl"):
        folder = tmp_path / name.replace(".", "-")
        RunFolder(folder).log(1, loss=1)
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
        with pytest.raises(RunError, match="leads out of the run's folder"):
            read_run(folder)


@pytest.mark.parametrize(
    ("content", "kind", "mime"),
    [
        (png([[1]]), "image", "image/png"),
        (b"\xff\xd8\xff\xe0", "image", "image/jpeg"),
        (b"RIFF\0\0\0\0WEBP", "image", "image/webp"),
        (tone(), "audio", "audio/wav"),
        (b"ID3", "audio", "audio/mpeg"),
        (b"\0\0\0\x20ftypM4A", "audio", "audio/mp4"),
        (b"<svg onload=alert(1)>", "image", None),
        (b"<html>", "image", None),
        (b"", "image", None),
        (png([[1]]), "audio", None),
        (b"x" * (LARGEST_FILE + 1), "image", None),
    ],
)
def test_files_are_what_their_bytes_say(content, kind, mime, tmp_path):
    (tmp_path / "a.png").write_bytes(content)
    if mime is None:
        with pytest.raises(LeftOutError):
            Room(10**7).embed(tmp_path, "a.png", kind)
    else:
        assert Room(10**7).embed(tmp_path, "a.png", kind).uri.startswith(f"data:{mime};base64,")


def test_small_images_are_enlarged_pixel_by_pixel(tmp_path):
    for size, pixelated in ((8, True), (96, True), (97, False)):
        (tmp_path / "a.png").write_bytes(png(np.zeros((size, size))))
        assert Room(10**6).embed(tmp_path, "a.png", "image").pixelated is pixelated


def test_a_page_that_is_full_says_so(tmp_path):
    run = RunFolder(tmp_path / "run")
    ledger(run.ledger, name=int)
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3))
    for i in range(EXAMPLES):
        run.example(i, image=noise)  # about 360 KB each, 480 KB in base64
    page = page_of(run.path)
    (gallery,) = blocks(page, Gallery)
    assert 1 <= sum(bool(tile.uri) for tile in gallery.tiles) < EXAMPLES
    assert "the page is full" in gallery.tiles[-1].note
    assert "of the files could not be shown" in said(page)
    assert 6_000_000 < len(render(page)) < LARGEST_PAGE


def test_a_page_that_is_too_large_is_not_written(tmp_path):
    page = Page("t", [], [Section("a", "b", [Paragraph("x" * LARGEST_PAGE)])])
    with pytest.raises(ValueError, match="more than 8,000,000"):
        write_page(page, tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------ statistics, comparison


@pytest.mark.parametrize("freedom", [1, 2, 3, 6, 7, 20, 99, 1000])
def test_quantiles_are_those_of_student(freedom):
    assert t_quantile(freedom) == pytest.approx(stdtrit(freedom, 0.975), rel=1e-9)


def test_one_value_has_no_interval():
    assert estimate([3.0]) == Estimate(3.0, None, None, 1)


def comparison(tmp_path, **options) -> Comparison:
    (found,) = compare([read_run(path) for path in sweep(tmp_path, **options)])
    return found


def test_settings_are_compared_seed_by_seed(tmp_path):
    found = comparison(tmp_path)
    assert found.group == "sweep"
    assert [setting.name for setting in found.settings] == ["plain training", "b = 2", "b = 4"]
    assert found.headline == "test_accuracy"
    assert found.is_curve
    plain, two, four = found.rows("test_accuracy")
    assert plain.difference is None
    assert plain.value.mean == pytest.approx(0.91)
    assert two.difference == Estimate(0, 0, 0, 3)
    # 0.020, 0.021, 0.022: mean 0.021, t(2) = 4.3027 times 0.001 / sqrt(3)
    assert four.difference.mean == pytest.approx(0.021)
    assert four.difference.high - four.difference.mean == pytest.approx(
        4.3027e-3 / 3**0.5, rel=1e-4
    )
    assert verdict(found) == (
        "Best by validation_accuracy: b = 4. Against plain training it makes +0.0210 (+0.0185 to "
        "+0.0235) of test_accuracy, over 3 seeds: clipping helps here."
    )


@pytest.mark.parametrize(
    ("by_seed", "ending"),
    [
        ([0.01, 0.02, 0.015], "clipping helps here."),
        ([-0.01, 0.02, 0.0], "no clear difference"),
        ([-0.01, -0.02, -0.015], "no b beats plain training here."),
        ([0.5], "one seed says little."),
    ],
)
@pytest.mark.parametrize("metric", ["accuracy", "error"])
def test_the_verdict_follows_from_the_numbers(by_seed, ending, metric, tmp_path):
    for seed, gain in enumerate(by_seed):
        for b in (None, 4):
            run = RunFolder(tmp_path / f"{b}-{seed}", microbatch_size=b, seed=seed)
            better = gain if b else 0.0
            run.log(1, **{metric: 0.5 - better if metric == "error" else 0.5 + better})
    (found,) = compare([read_run(path) for path in sorted(tmp_path.iterdir())])
    sentence = verdict(found)
    assert ending in sentence
    assert ("which flatters it" in sentence) == (len(by_seed) > 1)


def test_runs_that_cannot_be_paired_say_why(tmp_path):
    plain = RunFolder(tmp_path / "plain", seed=0, settings={"lr": 1})
    other = RunFolder(tmp_path / "other", seed=0, settings={"lr": 2})
    apart = RunFolder(tmp_path / "apart", microbatch_size=4, seed=5)
    paired = RunFolder(tmp_path / "paired", microbatch_size=2, seed=0)
    for run in (plain, other, apart, paired):
        run.log(1, loss=1)
    assert "no other setting has a seed in common" in said(page_of(plain.path, apart.path))
    assert "several settings" in said(page_of(plain.path, other.path, paired.path))
    assert "no plain training among the runs" in said(page_of(apart.path, paired.path))
    (found,) = compare([read_run(run.path) for run in (plain, other)])
    assert [setting.name for setting in found.settings] == [
        "plain training, lr 1",
        "plain training, lr 2",
    ]
    assert verdict(found) is None


def test_which_way_is_better_is_told_by_names():
    assert all(map(lower_is_better, ("loss", "val_loss", "WER", "test error", "ppl")))
    assert not any(map(lower_is_better, ("accuracy", "answer", "power", "f1", "reward")))


# -------------------------------------------------------------------------- ledgers and sections


def test_a_course_by_hand(tmp_path):
    from ledgers import Row, write

    steps = [[Row([1], 1.0, 1.0, loss=2.0), Row([2, 3], 3.0, 0.25, loss=5.0)], [Row([1], 2.0, 0.5)]]
    course = follow(write(tmp_path / "ledger", steps))
    assert (course.first, course.last, course.recorded, course.microbatches) == (0, 1, 2, 3)
    assert course.steps == [0.0, 1.0]
    assert course.norms[0.5] == [2.0, 2.0]
    assert course.norms[0.25] == [1.5, 2.0]
    assert course.loss == [4.0, None]
    assert course.largest == 2
    assert course.mean_weight == pytest.approx((1 + 2 * 0.25 + 0.5) / 4)


def test_long_courses_have_so_many_stretches(tmp_path):
    path = ledger(tmp_path / "ledger", steps=301)
    course = follow(path)
    assert len(course.steps) == 120
    assert course.steps == sorted(course.steps)
    assert course.recorded == 301
    assert course.microbatches == 301 * 6


def test_gradients_that_are_not_finite_are_counted(tmp_path):
    from ledgers import Row, write

    rows = [[Row([1], float("nan"), 0.0), Row([2], float("inf"), float("nan"))]] * 2
    page = page_of(write(tmp_path / "ledger", rows))
    assert "4 micro-batches had a gradient that was not finite" in said(page)
    assert render(page)


def test_the_page_of_a_described_run(tmp_path):
    page = page_of(described(tmp_path / "run").path, gallery=8)
    (gallery,) = blocks(page, Gallery)
    assert [tile.id for tile in gallery.tiles] == ["21", "18", "15", "12", "9", "6", "3", "0"]
    assert all(tile.wrong for tile in gallery.tiles)
    assert "Of the 8 examples with the highest scores, 8 have a wrong label." in said(page)
    assert (
        "The truth is known for all 24 examples: 8 labels are wrong, and 8 of them are among the "
        "8 highest scores (100 %; by chance it would be 33 %)." in said(page)
    )
    table = next(block for block in blocks(page, Table) if block.key.startswith("scores"))
    assert len(table.rows) == EXAMPLES
    assert [cell.text for cell in table.rows[0][:4]] == ["1", "21", "1", "2"]
    csv = base64.b64decode(table.download.split(",")[1]).decode()
    assert csv.splitlines()[1].startswith("21,1,")
    assert "None of the 2 domains is held back" in said(page)


def test_domains_of_the_ledger_and_the_guards_finding(tmp_path):
    path = ledger(
        tmp_path / "ledger", domain=lambda i: "hard <b>" if i % 3 == 0 else "easy", steps=120
    )
    page = page_of(path)
    assert "Clipping holds the domain 'hard <b>' back" in said(page)
    assert "It holds whole domains back: hard <b>" in page.verdict[0]
    keys = [figure.key for figure in blocks(page, Figure)]
    assert {"domains-1", "domains-time-1"} <= set(keys)


def test_places_in_the_batch_are_no_examples(tmp_path):
    from ledgers import Row, write

    path = write(tmp_path / "ledger", [[Row([0, 1], 1.0), Row([2, 3], 2.0)]] * 3)
    assert "look like places in the mini-batch" in said(page_of(path))


def test_many_ledgers_are_too_many(tmp_path):
    paths = [ledger(tmp_path / f"run{i}" / "ledger", steps=3) for i in range(5)]
    page = page_of(*paths)
    assert "5 runs have a ledger; those of the first 4 are shown." in said(page)
    assert len(blocks(page, Gallery)) == 4
    assert "Who drags?: run3" in [section.title for section in page.sections]
    assert len(render(page)) < LARGEST_PAGE


def test_every_figure_is_one_that_plotly_knows_and_says_how_to_read_it(tmp_path):
    run = described(tmp_path / "all")
    page = page_of(*sweep(tmp_path / "sweep"), run.path)
    figures = blocks(page, Figure)
    assert len(figures) == 8
    for figure in figures:
        assert len(figure.how_to_read) > 40
        for drawing in figure.choices.values():
            text = json.dumps({"data": drawing.data, "layout": dict(drawing.layout)})
            colours = re.sub(r"var\(--[a-z0-9-]+\)", "#123456", text)
            assert go.Figure(json.loads(colours)).data  # refuses what it does not know
    style = (Path(embedded.__code__.co_filename).parent / "style.css").read_text()
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", json.dumps([str(f.choices) for f in figures])))
    for name in used:
        assert style.count(f"{name}:") == 3, name  # light, dark by the system, dark by choice


def test_long_curves_are_thinned_to_their_last_point():
    xs, ys = thinned({step: float(step) for step in range(10_000)}, 100)
    assert len(xs) == len(ys) == 100
    assert (xs[-1], ys[-1]) == (9999, 9999.0)
    assert ys == sorted(ys)
    assert thinned({1: 1.0, 2: 2.0}, 100) == ([1, 2], [1.0, 2.0])


def test_what_differs_between_runs_is_told(tmp_path):
    page = page_of(*sweep(tmp_path))
    tables = {table.key: table for table in blocks(page, Table)}
    assert tables["differences"].headings == ("run", "micro-batch size b", "seeds")
    rows = [[cell.text for cell in row] for row in tables["differences"].rows]
    assert rows == [
        ["3 runs", "plain", "0 to 2"],
        ["3 runs", "2", "0 to 2"],
        ["3 runs", "4", "0 to 2"],
    ]
    assert [row[1].marked for row in tables["differences"].rows] == [False, True, True]
    shared = {row[0].text: row[1].text for row in tables["shared"].rows}
    assert (shared["lr"], shared["data.noise"]) == ("0.1", "0.2")


# --------------------------------------------------------------------------------- hostile data


def test_hostile_texts_stay_texts(tmp_path):
    run = RunFolder(tmp_path / "run", name=HOSTILE, group=HOSTILE, settings={HOSTILE: HOSTILE})
    ledger(run.ledger, name=lambda i: f"={HOSTILE}{i}")
    for i in range(EXAMPLES):
        run.example(f"={HOSTILE}{i}", text=HOSTILE, label=HOSTILE, domain=f"{HOSTILE}{i % 2}")
    run.log_all(1, {HOSTILE: 1})
    run.log_all(2, {HOSTILE: 2, "</script>": 1})
    html = render(page_of(run.path)).decode()
    own = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)  # plotly's, and ours
    assert html.count("<script>") == 2
    assert "&lt;script&gt;window.pwned=1" in own
    assert "\\u0026lt;script\\u0026gt;" in own
    assert "<img src=x" not in html
    assert "{{7*7}}" in html  # and not 49
    (csv,) = re.findall(r'href="data:text/csv;charset=utf-8;base64,([^"]+)"', own)
    assert all(
        line.startswith("\"'=") for line in base64.b64decode(csv).decode().split("\n")[1:] if line
    )


def test_texts_of_a_megabyte_are_cut(tmp_path):
    long = "<&>" * 350_000
    run = RunFolder(tmp_path / "run", name=long, settings={long: long}, command=long)
    ledger(
        run.ledger,
        name=lambda i: f"{i}{long[:100_000]}",
        domain=lambda i: f"{i % 2}{long}",
        steps=2,
    )
    for i in range(EXAMPLES):
        run.example(f"{i}{long[:100_000]}", text=long, label=long, truth=long)
    run.log_all(1, {long: 1})
    content = render(page_of(run.path))
    assert len(content) < 6_000_000
    assert b"The first 2,000 of 1,050,000 characters." in content
    assert b"(1,050,000 characters)" in content


def test_half_characters_do_not_stop_the_page(tmp_path):
    run = RunFolder(tmp_path / "run", name="half")
    run.log(1, loss=1)
    described_ = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps(described_ | {"command": "\ud800 \0 \x1b[31m"}))
    assert b"? \0" in render(page_of(run.path))


def test_json_in_the_page_ends_no_script():
    text = embedded({"</script>": ["<!--", "&", "\u2028", float("nan"), float("inf")]})
    assert not re.search("[<>&\u2028]", text)
    assert json.loads(text) == {"</script>": ["<!--", "&", "\u2028", None, None]}


# -------------------------------------------------------------------------------------- command


def test_the_command_writes_the_page_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)
    paths = [str(path) for path in sweep(tmp_path / "runs")]
    described(tmp_path / "runs" / "b4-0")
    assert main(["report", *paths, paths[0], "--title", "Mine & <b>yours</b>"]) == 0
    printed, log = capsys.readouterr()
    assert printed.splitlines()[-1] == "page: report.html"
    assert "clipping helps here." in printed
    assert "reading 9 runs" in log  # one was named twice
    assert "scoring 240 micro-batches" in log
    html = (tmp_path / "report.html").read_text()
    assert "<title>Mine &amp; &lt;b&gt;yours&lt;/b&gt;</title>" in html
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "runs"]


def test_a_page_that_cannot_be_written_is_an_error(tmp_path, capsys):
    run = sweep(tmp_path / "runs", sizes=(None,), seeds=(0,))[0]
    assert main(["report", str(run), "--output", str(tmp_path / "no" / "page.html")]) == 1
    assert "is not a folder" in capsys.readouterr().err
    (tmp_path / "taken").mkdir()
    assert main(["report", str(run), "--output", str(tmp_path / "taken")]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "runs must name at least one folder"),
        (("a", "--gallery", "-1"), "gallery must be between 0 and 1000, but got -1."),
    ],
)
def test_bad_options_are_refused(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as exit_:
        main(["report", *arguments])
    assert exit_.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_page_can_be_opened_at_once(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    path = sweep(tmp_path, sizes=(None,), seeds=(0,))[0]
    assert main(["report", str(path), "--output", str(tmp_path / "a b.html"), "--open"]) == 0
    assert opened == [(tmp_path / "a b.html").as_uri()]
    assert "There is nothing to compare yet" in (tmp_path / "a b.html").read_text()


def test_calling_it_from_code(tmp_path):
    path = sweep(tmp_path, sizes=(None,), seeds=(0,))[0]
    page = microclip.report.write_report([path, path], tmp_path / "page.html")
    assert page.title == "microclip: plain-0"
    with pytest.raises(TypeError, match="runs must be a list of folders"):
        microclip.report.write_report(path, tmp_path / "other.html")
    with pytest.raises(ValueError, match="at least one folder"):
        microclip.report.write_report([], tmp_path / "other.html")
    assert not (tmp_path / "other.html").exists()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        microclip.report.nonsense  # noqa: B018


def test_lines_without_end_are_passed_over(tmp_path):
    run = RunFolder(tmp_path)
    run.log(1, loss=1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 2, "long": "' + "x" * 33_000_000 + '"}\n')
    run.log(3, loss=3)
    found = read_run(tmp_path)
    assert found.metrics == {"loss": {1: 1.0, 3: 3.0}}
    assert "1 lines" in found.notes[0]


def test_a_few_scores_far_out_do_not_flatten_the_others():
    values = [0.001 * i for i in range(1000)] + [1e6]
    drawn = histogram({"examples": values}, "score").data[0]
    assert sum(drawn["y"]) == 1001
    assert drawn["x"][-1] < 2
    assert max(drawn["y"]) < 100


def test_the_same_runs_make_the_same_page(tmp_path):
    run = described(tmp_path / "run")
    assert render(page_of(run.path)) == render(page_of(run.path))


def test_a_run_read_twice_is_the_same(tmp_path):
    path = sweep(tmp_path, sizes=(4,), seeds=(0,))[0]
    one, two = read_run(path), read_run(path)
    assert replace(one, name="x").metrics == two.metrics


def test_a_plain_run_is_not_said_to_be_clipped(tmp_path):
    run = RunFolder(tmp_path / "run", microbatch_size=None, headline="test_accuracy")
    rows = [
        [ledgers.Row(ids=[0, 1, 2, 3], norm=1.0 + step, losses=[0.1, 0.2, 0.3, 2.0])]
        for step in range(20)
    ]
    ledgers.write(run.ledger, rows)
    run.log(20, test_accuracy=0.875)
    page = write_report([run.path], tmp_path / "page.html")
    assert page.verdict == [
        "test_accuracy is 0.875 after step 20.",
        "Plain training: nothing was clipped in 20 steps. Its losses tell which of 4 examples it "
        "finds hard.",
    ]
    titles = [section.title for section in page.sections]
    assert titles[1:] == ["Gradients", "Who drags?", "Scores", "What was run"]
