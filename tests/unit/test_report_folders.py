"""Run folders: writing and reading them, what is refused, and the files of examples."""

import base64
import json
import os
import re
import struct
import zlib

import numpy as np
import pytest

import microclip
from microclip.cli import main
from microclip.report import RunFolder
from microclip.report.blocks import Gallery, Page, Paragraph, Section
from microclip.report.media import LARGEST_FILE, ByteBudget, LeftOutError, png
from microclip.report.page import LARGEST_PAGE, render
from microclip.report.run_data import read_examples
from microclip.report.runs import RunError, read_run
from microclip.report.write import read_findings, write_page

from report_runs import EXAMPLES, blocks, described, ledger, page_of, said, tone

HOSTILE = "<script>window.pwned=1</script><img src=x onerror=alert(1)>\"'`${1}&amp;{{7*7}}\u2028"


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
    again.log(15, other=1)  # out of order, which is fine
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
    assert found.notes == ("Skipped 1 line of metrics.jsonl that could not be read as metrics.",)


def test_odd_metrics_are_skipped(tmp_path):
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


def test_files_of_examples_have_safe_names(tmp_path):
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


def test_pictures_have_the_right_pixels():
    matplotlib = pytest.importorskip("matplotlib.image")
    import io

    grey = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    back = matplotlib.imread(io.BytesIO(png(grey)))
    assert np.allclose(back * 255, grey)
    colours = np.random.default_rng(0).random((4, 5, 3))
    back = matplotlib.imread(io.BytesIO(png(colours)))
    assert np.abs(back[..., :3] - colours).max() < 0.5 / 255 + 1e-6
    assert png([[2.0, -1.0, float("nan")]]) == png([[255, 0, 0]])


RAMP = np.linspace(0, 1, 256).reshape(16, 16)


@pytest.mark.parametrize(
    "pixels",
    [
        RAMP,
        RAMP.astype(np.float16),
        RAMP * 2 - 1,
        RAMP * 255,
        (RAMP * 255).astype(np.float32),
        (RAMP * 255).round().astype(np.uint8),
        (RAMP * 255).round().astype(np.int64),
        (RAMP * 65535).round().astype(np.uint16),
        (RAMP * 4095).round().astype(np.uint16),  # 12 bits
        (RAMP * 65535).astype(np.float64),
        RAMP * 16,  # scikit-learn's digits
        RAMP * 4.5 - 2.1,  # standardized
        RAMP[None],  # channels first
    ],
    ids=lambda pixels: f"{pixels.dtype} to {pixels.max():g}",
)
def test_pictures_of_any_range_look_the_same(pixels):
    assert shades(png(pixels)) == pytest.approx(list(range(256)), abs=1)


def shades(content):
    """Return the pixels of a gray picture, without the number of the filter before each line."""
    (length,) = struct.unpack(">I", content[33:37])
    lines = zlib.decompress(content[41 : 41 + length])
    width = struct.unpack(">I", content[16:20])[0]
    return [shade for place, shade in enumerate(lines) if place % (width + 1)]


def test_a_dark_picture_of_bytes_stays_dark():
    assert shades(png(np.full((2, 2), 9, np.uint8))) == [9] * 4
    assert shades(png(np.array([[False, True]]))) == [0, 255]


def test_overshoot_of_resampling_is_cut_off():
    assert shades(png([[-0.03, 0.5, 1.04]])) == [0, 128, 255]
    assert shades(png([[-3.0, 51.0, 260.0]])) == [0, 51, 255]


def test_the_range_of_pixels_can_be_told():
    assert shades(png([[0, 5, 10]], (0, 10))) == [0, 128, 255]
    assert shades(png([[-128, 0, 127]], (-128, 127))) == [0, 128, 255]
    assert shades(png([[0.0, 1.0]], (1, 0))) == [255, 0]  # ink on paper
    assert shades(png([[3.0, 3.0], [float("inf"), float("nan")]])) == [255, 255, 255, 0]


@pytest.mark.parametrize(
    ("pixels", "given", "message"),
    [
        ([[-5, 9]], None, "between 0 and 65535, but these range from -5 to 9. Say which are black"),
        ([[0, 70000]], None, "but these range from 0 to 70000"),
        ([["a", "b"]], None, "Pixels must be numbers, but got an array of <U1"),
        ([[0, 1]], (1, 1), "two different numbers, black and white, but got (1, 1)"),
        ([[0, 1]], (0, float("nan")), "two different numbers"),
        (np.zeros((5, 4, 6)), None, "but got one of shape (5, 4, 6)"),
    ],
)
def test_pixels_that_cannot_be_shown_are_refused(pixels, given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        png(pixels, given)


# ----------------------------------------------------------------------------- reading, refusing


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("[]", 'does not say "format": "microclip-run"'),
        ('{"format": "other"}', 'does not say "format": "microclip-run"'),
        ('{"format": "microclip-run", "version": 3}', "has version 3, but this microclip reads"),
        (
            '{"format": "microclip-run", "version": 1, "microbatch_size": "4"}',
            'must be a positive integer, or null for plain training, but is "4".',
        ),
        ('{"format": "microclip-run", "version": 1}', "is empty: it has no ledger and no metric"),
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


def test_folders_that_are_not_runs(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("nowhere", "the folder does not exist"),
        ("file", "A run is a folder, but"),
        ("empty", "it has neither a run.json nor a ledger"),
    ):
        with pytest.raises(RunError, match=message):
            read_run(tmp_path / name)


def test_incomplete_ledgers(tmp_path):
    path = ledger(tmp_path / "ledger")
    part = next((path / "examples").glob("*.parquet"))
    moved = part.rename(tmp_path / "aside")
    with pytest.raises(ValueError, match="Part of the ledger .* was deleted"):
        read_findings([path])
    moved.rename(part)
    assert read_findings([path]).data
    said_by_manifest = json.loads((path / "ledger.json").read_text())
    (path / "ledger.json").write_text(json.dumps(said_by_manifest | {"version": 9}))
    with pytest.raises(ValueError, match="has version 9"):
        read_findings([path])
    (path / "ledger.json").unlink()
    with pytest.raises(ValueError, match=r"ledger.json is missing"):
        read_findings([path])


def test_an_empty_ledger_is_noted_beside_metrics_and_an_error_alone(tmp_path):
    run = RunFolder(tmp_path / "run")
    microclip.Ledger(run.ledger).close()
    with pytest.raises(ValueError, match="is empty: no step has been written yet"):
        read_findings([run.path])
    run.log(1, loss=1)
    assert "Its ledger is empty" in said(page_of(run.path))


def test_a_bare_ledger_is_a_run(tmp_path):
    path = ledger(tmp_path / "some run" / "ledger")
    for given in (path, path.parent):
        page = page_of(given)
        assert read_run(given).name == "some run"
        assert [section.title for section in page.sections] == [
            "Suspects",
            "Learning curves",
            "What clipping did",
            "Held back most",
            "Which examples drag?",
            "Scores",
            "What was run",
        ]
        assert "there is a ledger, but no run.json" in said(page)
        assert "these losses are from the ledger" in said(page)


# --------------------------------------------------------------------------- examples and media


def test_unknown_ids_are_noted(tmp_path):
    run = described(tmp_path / "run")
    run.example("9999", text="?")
    with (run.path / "examples.jsonl").open("a") as file:
        file.write('{"id": null}\n{"id": [1]}\nnonsense\n{"id": 1, "kind": "text"')
    page = page_of(run.path)
    assert "1 ids in examples.jsonl are not in the ledger, for instance '9999'" in said(page)
    assert "Skipped 3 lines of examples.jsonl" in said(page)


def test_a_later_description_of_an_example_wins(tmp_path):
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
    budget = ByteBudget(10_000)
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
            budget.embed(run, name, "image")
    assert budget.left == 10_000
    for name in ("inside.png", "fine.png", "./inside.png"):
        uri = budget.embed(run, name, "image").uri
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
            ByteBudget(10**7).embed(tmp_path, "a.png", kind)
    else:
        assert (
            ByteBudget(10**7).embed(tmp_path, "a.png", kind).uri.startswith(f"data:{mime};base64,")
        )


def test_small_images_are_enlarged_pixel_by_pixel(tmp_path):
    for size, pixelated in ((8, True), (96, True), (97, False)):
        (tmp_path / "a.png").write_bytes(png(np.zeros((size, size))))
        assert ByteBudget(10**6).embed(tmp_path, "a.png", "image").pixelated is pixelated


def test_a_page_that_is_full_says_so(tmp_path):
    run = RunFolder(tmp_path / "run")
    ledger(run.ledger, name=int)
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3))
    for i in range(EXAMPLES):
        run.example(i, image=noise)  # about 360 KB each, 480 KB in base64
    page = page_of(run.path)
    (gallery,) = blocks(page, Gallery)
    assert 1 <= sum(bool(tile.uri) for tile in gallery.tiles) < EXAMPLES
    assert "size limit" in gallery.tiles[-1].note
    assert "of the files could not be shown" in said(page)
    assert 6_000_000 < len(render(page)) < LARGEST_PAGE


def test_a_page_that_is_too_large_is_not_written(tmp_path):
    page = Page("t", [], [Section("a", "b", [Paragraph("x" * LARGEST_PAGE)])])
    with pytest.raises(ValueError, match="more than 8,000,000"):
        write_page(page, tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []
