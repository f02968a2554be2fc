"""The committed results of the reproduction are complete and follow from their records."""

import json
from pathlib import Path

import pytest

from microclip_lab.reproduction.command import study_of
from microclip_lab.reproduction.config import ReproduceConfig
from microclip_lab.reproduction.document import write_document
from microclip_lab.reproduction.page import FILE
from microclip_lab.reproduction.records import RecordStore
from microclip_lab.reproduction.verdicts import judge

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def study():
    return study_of(ReproduceConfig())


@pytest.fixture(scope="module")
def records():
    return RecordStore(RESULTS).records()


def test_every_run_of_the_plan_has_its_record_and_no_other(study, records):
    assert study.missing(records) == []
    assert {*records} == {*study.expected(records)}


def test_the_file_for_programs_has_the_verdicts_of_the_records(study, records):
    found = json.loads((RESULTS / "results.json").read_text())
    assert found["runs"]["done"] == found["runs"]["expected"] == len(records)
    verdicts = {claim["id"]: (claim["verdict"], claim["sentence"]) for claim in found["claims"]}
    assert verdicts == {j.claim.id: (j.verdict, j.sentence) for j in judge(study, records)}


@pytest.mark.full
def test_the_document_is_that_of_the_records(study, records, tmp_path):
    page, results = (tmp_path / "results" / name for name in (FILE, "results.json"))
    path = tmp_path / "docs" / "reproduction.md"
    made = write_document(study, records, path, page, results).read_text()
    kept = (ROOT / "docs" / "reproduction.md").read_text()
    again = "microclip reproduce --out results --only-page --document docs/reproduction.md"
    assert made == kept, f"Regenerate it: {again}"
