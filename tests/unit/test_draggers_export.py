"""Exported files: complete, readable by other tools, safe in spreadsheets."""

import csv
import json
import math

import pyarrow.parquet as pq
import pytest

from microclip import draggers
from microclip.files import open_whole

from ledgers import Row, write

HOSTILE = [
    "=HYPERLINK(1)",
    "+1",
    "-2",
    "@x",
    "\tx",
    "\rx",
    "<script>",
    'a"b,c',
    "../../etc",
    "plain",
    "new\nline",
    "é" * 10**6,
]


@pytest.fixture
def hostile(tmp_path):
    """Each id in turn has the longest gradient and the highest loss."""
    rows = [
        Row([one], 2.0**-i, domain=one if i % 2 else "d", losses=[1.0 / (i + 1)])
        for i, one in enumerate(HOSTILE)
    ]
    return draggers.score(write(tmp_path / "ledger", [rows]), "raw_loss")


def test_csv_has_no_formulas(hostile, tmp_path):
    hostile.to_csv(tmp_path / "found.csv")
    limit = csv.field_size_limit(10**8)
    try:
        with (tmp_path / "found.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    finally:
        csv.field_size_limit(limit)
    formulas = HOSTILE[:6]
    assert [r["id"] for r in rows] == [f"'{one}" for one in formulas] + HOSTILE[6:]
    assert rows[1]["domain"] == "'+1"
    assert [r["rank"] for r in rows] == [str(i + 1) for i in range(len(HOSTILE))]
    assert all(float(r["score"]) > 0 for r in rows)


def test_csv_leaves_numbers_alone(tmp_path):
    steps = [[Row([-1], 1.0), Row([2], 4.0)]]
    found = draggers.score(write(tmp_path / "ledger", steps), "group")
    found.to_csv(tmp_path / "found.csv")
    with (tmp_path / "found.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(r["id"]) for r in rows] == [2, -1]
    assert float(rows[1]["score"]) == pytest.approx(-math.log(2))
    assert rows[0]["loss"] == rows[0]["domain"] == ""


def test_parquet_keeps_everything(hostile, tmp_path):
    hostile.to_parquet(tmp_path / "found.parquet")
    assert pq.read_table(tmp_path / "found.parquet") == hostile.table
    assert hostile.table["id"].to_pylist() == HOSTILE


def test_cartography(tmp_path):
    """Probabilities 1/2 and 1/8 of the label: mean 5/16, deviation 3/16."""
    steps = [
        [Row(["a"], 1.0, losses=[math.log(2)]), Row(["b"], 1.0, losses=[0.0])],
        [Row(["a"], 1.0, losses=[math.log(8)]), Row(["c"], 1.0, losses=[-0.5])],
    ]
    found = draggers.score(write(tmp_path / "ledger", steps))
    found.to_cartography(tmp_path / "map.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "map.jsonl").read_text().splitlines()]
    by_id = {line["guid"]: line for line in lines}
    assert [line["guid"] for line in lines] == found.table["id"].to_pylist()
    assert by_id["a"]["confidence"] == pytest.approx(5 / 16, abs=1e-6)
    assert by_id["a"]["variability"] == pytest.approx(3 / 16, abs=1e-6)
    expected = {"guid": "b", "confidence": 1.0, "variability": 0.0, "appearances": 1}
    assert by_id["b"] == expected
    assert by_id["c"]["confidence"] == 1  # a loss below 0 is no better than one of 0


def test_cartography_needs_losses(tmp_path):
    norms = [[Row("a", 1.0), Row("b", 2.0)]]
    with pytest.raises(ValueError, match="the ledger has none"):
        draggers.score(write(tmp_path / "a", norms)).to_cartography(tmp_path / "map")
    means = [[Row("a", 1.0, loss=1.0), Row("b", 2.0, loss=2.0)]]
    with pytest.raises(ValueError, match="losses of micro-batches only"):
        draggers.score(write(tmp_path / "b", means)).to_cartography(tmp_path / "map")
    assert not (tmp_path / "map").exists()


def test_pruned_ids(tmp_path):
    steps = [[Row([i], 2.0**i) for i in range(5)]]
    found = draggers.score(write(tmp_path / "ledger", steps))
    found.to_pruned_ids(tmp_path / "kept.txt", n=2)
    assert (tmp_path / "kept.txt").read_text() == "0\n1\n2\n"
    found.to_pruned_ids(tmp_path / "kept.json", fraction=0.2, all_ids=[9, 4, 3, 2, 1, 0])
    assert json.loads((tmp_path / "kept.json").read_text()) == [9, 3, 2, 1, 0]


def test_ids_with_line_breaks(hostile, tmp_path):
    with pytest.raises(ValueError, match="does not fit on a single line.*json"):
        hostile.to_pruned_ids(tmp_path / "kept.txt", n=1)
    assert not (tmp_path / "kept.txt").exists()
    hostile.to_pruned_ids(tmp_path / "kept.json", n=1)
    assert json.loads((tmp_path / "kept.json").read_text()) == sorted(HOSTILE[1:])


def test_a_file_is_complete_or_not_there(tmp_path):
    place = tmp_path / "found.csv"
    place.write_text("before")

    def fail():
        with open_whole(place) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert place.read_text() == "before"
    assert list(tmp_path.iterdir()) == [place]


def test_a_folder_that_does_not_exist(hostile, tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        hostile.to_csv(tmp_path / "no" / "found.csv")
