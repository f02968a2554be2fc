"""`microclip theory`: help, errors, table and files."""

import csv
import io
import sys

import pytest

from microclip.cli import main
from microclip_lab.theory.command import simulated
from microclip_lab.theory.config import TheoryConfig
from microclip_lab.theory.table import KINDS, TheoryRow, best, lines, rows, sentences, write_csv


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


def run(capsys, tmp_path, *options):
    assert main(["theory", "--out", str(tmp_path / "out"), *options]) == 0
    return capsys.readouterr().out


def refused(capsys, *options):
    with pytest.raises(SystemExit) as exit_:
        main(["theory", *options])
    assert exit_.value.code == 2
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["theory", "--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    for part in (
        "which stays however long",
        "microclip theory --c 20 --sigma 0.1",
        "microclip theory --claims",
        "--epsilon",
        "--smoothness",
        "--gap",
        "default: theory-output",
        "the paper has 5.74 at b = 4",
    ):
        assert part in text
    assert "--no-claims" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--epsilon 1",
            "the probability of a dragger, must be at least 0 and below 1, but got 1.0",
        ),
        ("--sigma -1", "must be a finite number of at least 0, but got -1.0."),
        ("--smoothness 0", "must be a finite number above 0, but got 0.0."),
        ("--steps 0", "T, the number of steps, must be a whole number of at least 1, but got 0."),
        ("--c 5 --c-most 2", "needs c <= C, but got c = 5.0 and C = 2.0."),
        ("--microbatch-sizes 0", "b, the micro-batch size, must be a whole number"),
        ("--batch-size 8 --microbatch-sizes 16", "must not exceed the batch size 8, but got 16."),
        ("--batch-size 8 --microbatch-sizes 3 --simulate", "must divide the batch size 8"),
        ("--c-slope 9", "c_slope must be between -5 and 5, but got 9.0."),
    ],
)
def test_bad_options_are_refused_with_the_value(options, message, capsys):
    assert message in refused(capsys, *options.split())


def test_no_sizes_are_refused():
    with pytest.raises(ValueError, match="microbatch_sizes must have at least one size"):
        TheoryConfig(microbatch_sizes=())


def test_it_ends_with_the_files(capsys, tmp_path):
    text = run(capsys, tmp_path)
    out = tmp_path / "out"
    assert text.splitlines()[-3:] == [
        f"picture: {out / 'theory.png'}",
        f"vector:  {out / 'theory.svg'}",
        f"table:   {out / 'theory.csv'}",
    ]
    assert (out / "theory.png").read_bytes().startswith(b"\x89PNG")
    drawing = (out / "theory.svg").read_text()
    for words in ("micro-batch size b", "gradient norm", "How to read it", *KINDS.values()):
        assert words in drawing
    again = tmp_path / "again"
    assert main(["theory", "--out", str(again)]) == 0
    assert (again / "theory.svg").read_text() == drawing


def test_the_table_by_hand(capsys, tmp_path):
    # b = 1, epsilon = .2: A = .8, so bias 2 and 1 times sigma; (10 + .5)/(.8 * 10) = 1.3125
    text = run(capsys, tmp_path, "--steps", "100", "--batch-size", "4")
    (row,) = csv.DictReader(io.StringIO((tmp_path / "out/theory.csv").read_text().split("\n2,")[0]))
    assert row["printed_bias"] == row["printed_total"] == ""
    assert float(row["corrected_bias"]) == pytest.approx(2)
    assert float(row["symmetric_bias"]) == pytest.approx(1)
    assert float(row["corrected_transient"]) == pytest.approx(1.3125)
    assert float(row["symmetric_total"]) == pytest.approx(2.3125)
    assert "3.31" in text
    assert "2.31" in text
    assert "applies to none of these b" in text


def test_the_papers_constants_give_no_best_b_in_between(capsys, tmp_path):
    text = run(capsys, tmp_path)
    assert text.count("smallest at b = 512") == 3
    assert "says nothing about b <= 4" in text


def test_long_draggers_and_little_noise_do(capsys, tmp_path):
    text = run(capsys, tmp_path, "--c", "20", "--sigma", "0.1")
    assert "corrected, any noise: smallest at b = 2" in text
    assert "a best b in between" in text
    assert "printed in the paper: smallest at b = 512" in text


def test_a_c_that_falls_fast_gives_the_printed_bias_a_least_value():
    config = TheoryConfig(c=200, c_slope=-0.7)
    biases = {row.b: row.bounds["printed"].bias for row in rows(config) if row.bounds["printed"]}
    assert min(biases, key=biases.get) == 64
    # 201 * 4^-.7 - 1
    assert config.lengths(4) == pytest.approx((75.166, 75.166), rel=1e-4)
    assert TheoryConfig(c=1, c_slope=-3).lengths(8) == (0, 0)  # no length is negative


def test_smallest_b_can_be_best():
    config = TheoryConfig(c=20, sigma=0, steps=100)
    found = rows(config)
    assert best(found, "corrected").b == 1
    assert "the smallest b it applies to" in sentences(config, found)[1]


def test_without_noise_there_is_a_picture_too(capsys, tmp_path):
    run(capsys, tmp_path, "--sigma", "0", "--epsilon", "0")
    assert (tmp_path / "out/theory.png").exists()


def test_rates_of_sgd():
    names = {line.name: line.bound for line in lines(TheoryConfig())}
    # 20000^(-1/4) sqrt(20 + 1/512)
    plain = names["SGD without draggers (Bu et al.)"]
    assert plain.total == pytest.approx(0.08408964 * 4.47235, rel=1e-4)
    assert all(line.bound is None for line in lines(TheoryConfig(c=1e4))[2:])


def test_claims(capsys, tmp_path):
    text = run(capsys, tmp_path, "--claims")
    assert "theorem on micro-batch clipping" in text
    assert "49" in text
    assert "15.6" in text


def test_simulated_beside_the_bounds(capsys, tmp_path):
    text = run(capsys, tmp_path, "--simulate", "--steps", "20", "--batch-size", "4")
    assert "stays below both corrected bounds at every b" in text
    found = list(csv.DictReader(io.StringIO((tmp_path / "out/theory.csv").read_text())))
    assert [row["b"] for row in found] == ["1", "2", "4"]
    for row in found:
        assert 0 < float(row["measured_unit"]) <= float(row["symmetric_total"])
        assert float(row["measured_min"]) > 0
    assert "simulated, unit rule" in (tmp_path / "out/theory.svg").read_text()


def test_a_broken_bound_would_be_said():
    (row,) = rows(TheoryConfig(microbatch_sizes=(4,)))
    broken = TheoryRow(row.b, row.c, row.C, row.bounds, measured=99.0, measured_min=1.0)
    assert "exceeds a corrected bound at b = 4" in simulated([broken])
    assert "99.0,1.0" in write_csv([broken])


def test_a_folder_that_cannot_be_made_is_named(tmp_path, capsys):
    (tmp_path / "taken").write_text("a file")
    assert main(["theory", "--out", str(tmp_path / "taken")]) == 1
    assert str(tmp_path / "taken") in capsys.readouterr().err


def test_a_missing_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["theory", "--out", str(tmp_path / "out")]) == 1
    assert 'pip install "microclip-lab"' in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
