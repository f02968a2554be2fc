"""The page, results.json and the document of the reproduction, from made-up records."""

import json
import re
from dataclasses import replace

import pytest
from playwright.sync_api import Page, expect

from microclip_lab.reproduction.claims import CLAIMS
from microclip_lab.reproduction.document import write_document
from microclip_lab.reproduction.errata import remarks
from microclip_lab.reproduction.page import write_page
from microclip_lab.reproduction.records import Job
from microclip_lab.reproduction.results import summary, write_results
from microclip_lab.reproduction.study import Study
from microclip_lab.reproduction.tasks import tasks
from microclip_lab.reproduction.theory_part import failing_statements, rate_tables

from browsers import chromium, needs_a_browser
from reproduction_records import everything, plan, record

HOSTILE = '<script>window.pwned=1</script><img src=x onerror="window.pwned=2">|`*\'"</style>'
ID = re.compile(
    r"((?:digits|clean-digits|digits-sgd|cifar10n|speech|mixture|movie)/[\w-]+/"
    r"(?:tuning-)?(?:[\d.e-]+-)?seed)(\d+)(?:…(\d+))?"
)


@pytest.fixture(scope="module")
def study():
    return plan()


@pytest.fixture(scope="module")
def records(study):
    return everything(study)


@pytest.fixture(scope="module")
def written(tmp_path_factory, study, records):
    return write_page(study, records, tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def opened(browser):
    """Open a page; console errors fail the test."""
    complaints: list[str] = []
    contexts = []

    def look(path, width: int = 1100, scheme: str = "light") -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path.as_uri())
        expect(page.locator(".plot:not(:has(svg .xy))")).to_have_count(0)
        return page

    yield look
    for context in contexts:
        context.close()
    assert complaints == []


def ids_in(text: str) -> set[str]:
    """Return all run ids in a text, with ranges expanded."""
    return {
        f"{begin}{seed}"
        for begin, first, last in ID.findall(text)
        for seed in range(int(first), int(last or first) + 1)
    }


@pytest.mark.full
@needs_a_browser
@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (390, "dark")])
def test_the_page_begins_with_verdicts_and_names_runs_that_exist(
    opened, written, records, width, scheme
):
    page = opened(written, width, scheme)
    first = page.query_selector("table")
    assert first.get_attribute("id") == "verdict-table"
    rows = first.query_selector_all("tbody tr")
    assert [row.inner_text().split()[0] for row in rows] == [claim.id for claim in CLAIMS]
    known = {each.id for each in records.values()}
    assert ids_in(page.text_content("#every-run-table")) == known
    others = "tables => tables.map(table => table.textContent).join(' ')"
    named = ids_in(page.eval_on_selector_all("table:not(#every-run-table)", others))
    assert len(known) / 2 < len(named)
    assert named <= known
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert len(page.query_selector_all(".plot")) == 4


@pytest.mark.full
@needs_a_browser
def test_wide_tables_take_the_room_that_a_screen_has(opened, written):
    narrow, wide = opened(written, 600), opened(written, 1600)
    spills = "table => table.parentElement.scrollWidth > table.parentElement.clientWidth"
    assert narrow.eval_on_selector("#arms-digits", spills)
    assert not wide.eval_on_selector("#arms-digits", spills)
    for page, width in ((narrow, 600), (wide, 1600)):
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.full
@needs_a_browser
def test_figures_can_be_chosen_and_runs_filtered(opened, written):
    page = opened(written)
    tasks_of = {
        key: page.eval_on_selector_all(
            f"select[data-for={key}] option", "options => options.map(o => o.textContent)"
        )
        for key in ("cosines", "sweet-spot", "convergence")
    }
    assert set(map(tuple, tasks_of.values())) == {("speech", "CIFAR-10N", "digits")}
    page.select_option("select[data-for=sweet-spot]", label="digits")
    ticks = page.eval_on_selector_all(
        "#sweet-spot .xtick text", "ticks => ticks.map(t => t.textContent)"
    )
    assert ticks == ["1", "2", "4", "8", "16", "32"]
    page.fill("[data-controls=every-run-table-rows] input", "speech/b16/")
    shown = page.query_selector_all("#every-run-table-rows tr:not([hidden])")
    assert len(shown) == 5


@pytest.mark.full
@needs_a_browser
def test_a_page_without_records_says_what_is_missing(opened, tmp_path, study):
    page = opened(write_page(study, {}, tmp_path))
    expected = len(study.expected({}))
    assert f"0 of {expected} runs are done" in page.inner_text(".verdict")
    for key in ("figure-1", "table-2", "table-6", "controls", "tuning", "every-run"):
        assert "not run yet" in page.inner_text(f"#section-{key}").lower(), key
    assert "not stated" in page.inner_text("#section-table-1")  # which needs no run


@pytest.mark.full
@needs_a_browser
def test_some_tasks_alone_and_shorter_ones_make_a_page(opened, tmp_path):
    quick = Study(tuple(task for task in tasks("quick") if task.name == "speech"))
    page = opened(write_page(quick, everything(quick), tmp_path))
    assert "verdicts mean nothing" in page.inner_text(".verdict")
    assert "not run yet" in page.inner_text("#section-table-6").lower()


@pytest.mark.full
@needs_a_browser
@pytest.mark.parametrize("seeds", [1, 2])
def test_a_run_that_is_under_way_makes_a_page(opened, tmp_path, records, seeds):
    study = plan("digits")
    begun = {
        job: each
        for job, each in records.items()
        if job.task == "digits"
        and job.arm in ("plain", "b1")
        and (job.stage == "tuning" or job.seed < 200 + seeds)
    }
    page = opened(write_page(study, begun, tmp_path))
    shown = page.inner_text("#arms-digits")
    assert ("not run yet" in shown) == (seeds == 1)  # of one seed there is no interval
    assert "b1" in shown


@pytest.mark.full
@needs_a_browser
def test_data_stays_data(opened, tmp_path):
    study = plan("digits")
    hostile = Study(
        tuple(
            replace(task, arms=tuple(replace(a, about=HOSTILE) for a in task.arms))
            for task in study.tasks
        )
    )
    records = {
        job: replace(each, diverged=HOSTILE if job.seed == 205 else "", weights=HOSTILE)
        for job, each in everything(hostile).items()
    }
    job = Job("digits", "plain", "tuning", 0.5, 100)
    records[job] = replace(record(job), made={HOSTILE: HOSTILE, "seconds": 1.0})
    page = opened(write_page(hostile, records, tmp_path))
    assert page.evaluate("window.pwned") is None
    assert page.query_selector("img[src=x]") is None
    assert HOSTILE in page.inner_text("#arms-digits")
    document = document_of(hostile, records, tmp_path)
    assert "<script>" not in document
    assert "<img" not in document


def test_the_same_records_give_the_same_bytes(tmp_path, study, records):
    first = write_results(study, records, tmp_path / "one").read_bytes()
    shuffled = dict(sorted(records.items(), key=lambda pair: hash(pair[0].id[::-1])))
    assert write_results(study, shuffled, tmp_path / "two").read_bytes() == first
    again = write_page(study, shuffled, tmp_path / "two").read_bytes()
    assert write_page(study, records, tmp_path / "one").read_bytes() == again


def test_the_file_has_verdicts_tables_and_ids(tmp_path, study, records):
    found = json.loads(write_results(study, records, tmp_path).read_text())
    assert found["command"] == "microclip reproduce --out results"
    assert found["runs"] == {"done": len(records), "expected": len(records), "diverged": 0}
    assert found["core_seconds"] == 60.0 * len(records)
    assert [kind["runs"] for kind in found["made_with"]] == [len(records)]
    assert [claim["id"] for claim in found["claims"]] == [claim.id for claim in CLAIMS]
    known = {each.id for each in records.values()}
    assert ids_in(json.dumps(found, ensure_ascii=False)) == known
    digits = found["tasks"]["digits"]
    plain, b4 = (
        next(arm for arm in digits["arms"] if arm["arm"] == name) for name in ("plain", "b4")
    )
    assert plain["gain"] is None
    figure = b4["figures"]["best_test_accuracy"]["mean"]
    gained = figure - plain["figures"]["best_test_accuracy"]["mean"]
    assert b4["gain"]["estimate"]["mean"] == pytest.approx(gained)
    assert set(b4["gain"]["values"]) == {str(seed) for seed in range(200, 206)}
    assert [trial["value"] for trial in digits["tuning"][:3]] == [3e-4, 1e-3, 3e-3]
    assert [trial["is_chosen"] for trial in digits["tuning"][:3]] == [False, True, False]
    assert [trial["at_edge"] for trial in digits["tuning"][:3]] == [True, False, True]
    assert list(digits["curves"]["b4"]) == [str(step) for step in range(75, 1501, 75)]
    assert len(found["tasks"]["speech"]["moments"]["plain"]) == 6
    ratios = found["tasks"]["speech"]["ratios"]
    assert [ratio["size"] for ratio in ratios] == [1, 2, 4, 8, 16]


def test_what_is_not_finite_is_null(study):
    task = study.task("digits")
    jobs = study.evaluation(task, task.arm("plain"), 0.001)
    records = {job: record(job, diverged="The loss was not finite.") for job in jobs}
    for job in study.missing({}):
        if (job.task, job.arm) == ("digits", "plain"):
            worth = 0.9 if job.value == 0.001 else 0.8
            records[job] = record(job, {"best_validation_accuracy": worth})
    found = summary(study, records)
    plain = found["tasks"]["digits"]["arms"][0]
    assert len(plain["diverged"]) == task.seeds
    json.dumps(found["runs"], allow_nan=False)


def test_table_1_keeps_the_corrected_bounds_and_names_where_nothing_is_stated():
    rare, most = rate_tables()
    assert rare.best["corrected"] == 4  # between 1 and 64
    assert [row.b for row in rare.rows if row.printed is None] == [1, 2, 4, 8]
    assert all(row.printed is not None for row in most.rows)
    for table in (rare, most):
        for row in table.rows:
            assert row.unit <= row.symmetric <= row.corrected
        assert all(line.bound is None or line.measured <= line.bound for line in table.lines)


def document_of(study, records, root):
    page, results = root / "results" / "reproduction.html", root / "results" / "results.json"
    path = root / "docs" / "reproduction.md"
    return write_document(study, records, path, page, results).read_text()


def test_what_the_paper_gets_wrong_can_be_checked(study, records):
    assert len(failing_statements()) == 14
    said = " ".join(remark.what for remark in remarks(study, records))
    assert "85.53 to 85.56" in said  # by the sizes it lists itself
    assert "89.35 to 88.26" in said
    known = remarks(study, records)[0].how_we_know
    assert "11 of 11 runs with b = B" in known  # made-up weights are all alike


def test_the_document_has_the_verdicts_and_all_tables(tmp_path, study, records):
    text = document_of(study, records, tmp_path)
    assert text.index("## Verdicts") < text.index("## Table 1")
    for claim in CLAIMS:
        assert f"| {claim.id} {claim.title} |" in text
    for number in range(1, 7):
        assert f"Table {number}" in text
    assert "[the page](../results/reproduction.html)" in text
    assert "`microclip reproduce --out results`" in text
    known = {each.id for each in records.values()}
    assert ids_in(text.replace("\\", "")) <= known
    for line in text.splitlines():
        if line.startswith("| "):
            assert line.endswith(" |")
    widths = [
        len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("| C2")
    ]
    assert widths == [5]


def test_a_document_without_records_can_be_made(tmp_path, study):
    text = document_of(study, {}, tmp_path)
    assert "not run yet" in text
    assert "not run yet: not run yet" not in text
    assert f"0 of {len(study.expected({}))} runs are done" in text
