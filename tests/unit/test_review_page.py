"""Reviewing suspects in a real browser: by keyboard, saved, exported, applied."""

import csv
import json
import re

import pytest
from playwright.sync_api import Browser, Page, expect
from review_runs import COUNT, recorded

import microclip
from microclip.cli import main
from microclip.report.write import assemble, read_findings, write_page

from browsers import HOSTILE, Watched, chromium, luminance, needs_a_browser

pytestmark = [needs_a_browser, pytest.mark.full]


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("run") / "run").path


@pytest.fixture(scope="module")
def page_file(run):
    path = run.parent / "page.html"
    write_page(assemble(read_findings([run]), "Three classes"), path)
    return path


@pytest.fixture
def opened(browser: Browser):
    contexts = []

    def open_page(path, width=1100, height=900, script="", **options) -> Watched:
        context = browser.new_context(
            viewport={"width": width, "height": height}, accept_downloads=True, **options
        )
        contexts.append(context)
        if script:
            context.add_init_script(script)
        watched = Watched(context.new_page())
        watched.page.goto(path.as_uri())
        return watched

    yield open_page
    for context in contexts:
        context.close()


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def saved(seen: Watched) -> dict:
    found = seen.ask("Object.entries(localStorage).filter(([k]) => k.startsWith('microclip'))")
    ((_, content),) = found
    return json.loads(content)["verdicts"]


def shown_ids(seen: Watched) -> list[str]:
    texts = seen.page.locator(".suspect").all_inner_texts()
    return [line[3:] for text in texts for line in text.split("\n") if line.startswith("id ")]


def current(seen: Watched) -> int:
    """Return the place of the current suspect on the page."""
    return seen.ask(
        "[...document.querySelectorAll('.suspect')].findIndex(t => t.ariaCurrent === 'true')"
    )


def progress(seen: Watched) -> str:
    return seen.page.locator("[data-progress]").inner_text()


def exported(seen: Watched, kind: str, folder):
    with seen.page.expect_download() as started:
        seen.page.locator(f"[data-export={kind}]").click()
    path = folder / started.value.suggested_filename
    started.value.save_as(path)
    return path


def test_the_suspects_are_on_the_first_screen(page_file, opened, run):
    seen = opened(page_file)
    flagged = microclip.find_issues(run / "ledger").ids()
    headline = seen.page.locator(".headline").inner_text()
    assert headline.endswith("here they are.")
    assert seen.ask("document.querySelector('.suspect').getBoundingClientRect().top") < 700
    assert shown_ids(seen) == [str(one) for one in flagged[:24]]
    first = seen.page.locator(".suspect").first.inner_text()
    assert re.search(r"given (ant|bee|cat) \(\d\) → suggested (ant|bee|cat) \(\d\)", first)
    assert "wrong label" in first
    assert "the model preferred another class" in first
    sizes = seen.ask("[...document.querySelectorAll('.suspect img')].map(i => i.naturalWidth)")
    assert sizes
    assert set(sizes) == {8}
    assert seen.complaints == []


def test_review_by_keyboard_survives_a_reload_and_is_applied(page_file, opened, run, tmp_path):
    seen = opened(page_file)
    ids = shown_ids(seen)
    assert seen.page.locator("[data-export=csv]").is_disabled()
    press(seen.page, "1")  # nothing is selected yet
    assert progress(seen) == f"0 of {total(seen)} reviewed"
    press(seen.page, "j", "1", "2", "3", "e")
    assert seen.ask("document.activeElement.tagName") == "INPUT"
    assert seen.ask("document.activeElement.value") == suggestion(seen, 3)  # offered first
    seen.page.keyboard.type("bee")
    press(seen.page, "Enter", "3", "k", "0", "j")
    count = total(seen)
    assert progress(seen) == f"4 of {count} reviewed: 1 keep, 2 relabel, 1 drop"
    expected = {
        ids[0]: {"verdict": "keep"},
        ids[1]: {"verdict": "relabel", "label": suggestion(seen, 1)},
        ids[2]: {"verdict": "drop"},
        ids[3]: {"verdict": "relabel", "label": "1"},
    }
    assert saved(seen) == expected
    assert current(seen) == 5
    seen.page.reload()
    assert current(seen) == 5
    assert saved(seen) == expected
    assert progress(seen).startswith("4 of")
    states = seen.page.locator(".verdict-given").all_inner_texts()[:4]
    assert states[0] == "✓ keep"
    assert states[2] == "✕ drop"
    assert states[3] == "→ relabel bee (1)"
    files = [exported(seen, kind, tmp_path) for kind in ("csv", "json")]
    assert [file.name for file in files] == [
        "review-three-classes.csv",
        "review-three-classes.json",
    ]
    rows = list(csv.DictReader(files[0].read_text().splitlines()))
    assert [row["id"] for row in rows] == ids[:4]
    assert float(rows[0]["probability"]) > 0.5
    for file in files:
        review = microclip.read_review(file, run)
        assert {str(one): verdict for one, verdict in review.verdicts.items()} == {
            one: entry["verdict"] for one, entry in expected.items()
        }
        assert review.labels[int(ids[3])] == 1
        out = tmp_path / file.suffix[1:]
        assert main(["apply", str(file), "--run", str(run), "--out", str(out)]) == 0
        kept = (out / "keep.txt").read_text().split()
        assert kept == [str(i) for i in range(COUNT) if str(i) != ids[2]]
    assert seen.complaints == []


def total(seen: Watched) -> int:
    return seen.ask("document.querySelector('.review progress').max")


def suggestion(seen: Watched, place: int) -> str:
    script = "JSON.parse(document.getElementById('reviews').textContent)['suspects-1'].rows"
    return seen.ask(script)[place]["suggested"]


def test_review_by_mouse(page_file, opened):
    seen = opened(page_file)
    first = seen.page.locator(".suspect").first
    keep = first.get_by_role("button", name="Keep")
    keep.click()
    assert keep.get_attribute("aria-pressed") == "true"
    keep.click()  # again: taken back
    assert keep.get_attribute("aria-pressed") == "false"
    assert saved(seen) == {}
    first.get_by_role("button", name="Other label").click()
    first.locator("input").fill("dog")
    first.locator(".other button").click()
    assert "“dog” is not one of the labels: ant (0), bee (1), cat (2)" in first.inner_text()
    press(seen.page, "Escape")
    first.get_by_role("button", name="Drop").click()
    assert [one["verdict"] for one in saved(seen).values()] == ["drop"]
    clear = seen.page.locator("[data-reset]")
    clear.click()
    assert clear.inner_text() == "Clear 1? Click again"
    assert len(saved(seen)) == 1
    clear.click()
    assert saved(seen) == {}
    assert seen.complaints == []


def test_filters_and_pages(page_file, opened):
    seen = opened(page_file)
    count = total(seen)
    assert count > 24
    seen.page.get_by_role("button", name="Next").first.click()
    assert len(shown_ids(seen)) == min(24, count - 24)
    press(seen.page, "k")  # back over the edge of the page
    assert len(shown_ids(seen)) == 24
    assert (
        seen.ask("[...document.querySelectorAll('.suspect')].indexOf(document.activeElement)") == 23
    )
    seen.page.locator("[data-filter=given]").select_option("label 1")
    assert 0 < total(seen) < count
    labels = seen.page.locator(".suspect .labels").all_inner_texts()
    assert all(text.startswith("given bee (1)") for text in labels)
    press(seen.page, "Escape")
    seen.page.locator("[data-filter=given]").select_option("all")
    seen.page.locator(".suspect").first.get_by_role("button", name="Drop").click()
    seen.page.locator("[data-filter=verdict]").select_option("drop")
    assert total(seen) == 1
    seen.page.locator("[data-filter=verdict]").select_option("none")
    assert total(seen) == count - 1
    seen.page.locator("[data-filter=verdict]").select_option("")
    seen.page.locator("[data-filter=probability]").select_option("0.99")
    sure = total(seen)
    assert 0 < sure <= count
    seen.page.locator("[data-filter=words]").fill("no such words")
    assert shown_ids(seen) == []
    assert seen.page.get_by_text("No suspect matches these filters.").is_visible()
    seen.page.locator("[data-filter=words]").fill("example 30")
    assert "30" in shown_ids(seen) or sure < count
    assert seen.complaints == []


def test_without_storage_it_says_so(page_file, opened):
    refuse = "Object.defineProperty(window, 'localStorage', {get() { throw new Error('no'); }})"
    seen = opened(page_file, script=refuse)
    assert seen.page.get_by_text("does not let the page save your verdicts").is_visible()
    press(seen.page, "j", "3")
    assert progress(seen).startswith("1 of")
    assert seen.page.locator("[data-export=csv]").is_enabled()
    assert seen.complaints == []


def test_two_tabs_share_a_review(page_file, opened):
    seen = opened(page_file)
    other = Watched(seen.page.context.new_page())
    other.page.goto(page_file.as_uri())
    press(seen.page, "j", "3")
    other.page.get_by_text("✕ drop").wait_for()
    assert progress(other) == progress(seen)
    assert seen.complaints == other.complaints == []


def test_damaged_storage_is_no_harm(page_file, opened):
    key = "microclip-review-"
    seen = opened(page_file)
    (name,) = seen.ask("Object.keys(localStorage)")
    assert name.startswith(key)
    for content in ("{", "7", '{"verdicts": {"0": {"verdict": "explode"}, "1": null}}'):
        seen.ask(f"localStorage.setItem({json.dumps(name)}, {json.dumps(content)})")
        seen.page.reload()
        assert progress(seen).startswith("0 of")
        assert saved(seen) == {}
    assert seen.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_in_both_themes(page_file, opened, scheme):
    seen = opened(page_file, color_scheme=scheme)
    press(seen.page, "j", "1")
    for text in (".suspect .note", ".suspect .labels", ".verdict-given", ".keys", ".kind"):
        shades = [
            seen.ask(f"getComputedStyle(document.querySelector('{one}')).{what}")
            for one, what in ((text, "color"), (".suspect", "backgroundColor"))
        ]
        dark, light = sorted(map(luminance, shades))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, text
    assert seen.complaints == []


def test_on_a_phone(page_file, opened):
    seen = opened(page_file, width=390, height=844, has_touch=True, is_mobile=True)
    seen.page.locator(".suspect").first.get_by_role("button", name="Drop").tap()
    assert progress(seen).startswith("1 of")
    assert seen.ask("document.scrollingElement.scrollWidth") <= 390
    nav = "document.querySelector('nav').getBoundingClientRect().top"
    seen.ask("window.scrollTo({top: 3000, behavior: 'instant'})")
    assert abs(seen.ask(nav)) < 1  # still in view
    heights = seen.ask("[...document.querySelectorAll('.actions button')].map(b => b.offsetHeight)")
    assert min(heights) >= 24  # required by WCAG 2.2
    hints = seen.ask(
        """[...document.querySelectorAll('.scroll')].filter(s => s.offsetParent).map(s =>
            [s.scrollWidth > s.clientWidth + 1, !s.previousElementSibling.hidden])"""
    )
    assert hints
    assert all(wide == said for wide, said in hints)
    assert any(wide for wide, _ in hints)
    assert seen.complaints == []


def test_it_is_accessible(page_file, opened):
    seen = opened(page_file)
    assert seen.ask("[...document.querySelectorAll('input,select')].every(e => e.labels.length)")
    assert seen.page.locator(".suspect img:not([alt])").count() == 0
    ids = seen.ask("[...document.querySelectorAll('[id]')].map(e => e.id).filter(i => i)")
    assert len(ids) == len(set(ids))
    assert seen.page.locator(".suspect[tabindex='0']").count() == 1  # one stop for the tab key
    assert seen.page.locator(".suspect[aria-current=true]").count() == 1
    press(seen.page, "j", "j")
    assert seen.ask("document.activeElement.getAttribute('aria-current')") == "true"
    nav = seen.page.locator("nav a").nth(2)
    nav.click()
    expect(seen.page.locator("nav a[aria-current]")).to_have_count(1)
    assert seen.complaints == []


def test_in_print_and_without_scripts_there_is_a_table(page_file, browser):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_file.as_uri())
    assert page.locator("#suspects-1-listed").is_visible()
    assert page.locator("#suspects-1-listed tbody tr").count() > 24
    assert not page.locator(".review").is_visible()
    context.close()
    context = browser.new_context()
    page = context.new_page()
    page.goto(page_file.as_uri())
    assert not page.locator("#suspects-1-listed").is_visible()
    page.emulate_media(media="print")
    assert page.locator("#suspects-1-listed").is_visible()
    context.close()


def test_hostile_ids_labels_and_texts(tmp_path, opened):
    run = recorded(
        tmp_path / "run",
        name=lambda i: f"={HOSTILE}\n{i}",
        classes=[f"{HOSTILE}{i}" for i in range(3)],
        text=HOSTILE,
    )
    path = tmp_path / "page.html"
    write_page(assemble(read_findings([run.path]), HOSTILE), path)
    seen = opened(path)
    assert HOSTILE in seen.page.locator(".suspect .text").first.inner_text()
    assert HOSTILE[:30] in seen.page.locator(".suspect .labels").first.inner_text()
    assert seen.page.locator(".suspect script, .review a, .suspect img[src=x]").count() == 0
    press(seen.page, "j", "3", "2", "e")
    seen.page.keyboard.type("<b>bold</b>")
    press(seen.page, "Enter")
    assert "“<b>bold</b>” is not one of the labels" in seen.page.locator(".suspects").inner_text()
    press(seen.page, "Escape")
    for select in seen.page.locator(".review select:visible").all():
        for value in select.locator("option").evaluate_all("os => os.map(o => o.value)"):
            select.select_option(value=value)
    verdicts = saved(seen)
    assert len(verdicts) == 2
    for kind in ("csv", "json"):
        review = microclip.read_review(exported(seen, kind, tmp_path), run.path)
        assert {one: verdict["verdict"] for one, verdict in verdicts.items()} == review.verdicts
        assert all(one.startswith(f"={HOSTILE}\n") for one in review.verdicts)
    assert seen.ask("window.pwned") is None
    assert seen.complaints == []
