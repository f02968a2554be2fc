"""The page in a real browser: the system's Chromium, driven by playwright."""

from itertools import pairwise

import pytest
from playwright.sync_api import Browser, Page, expect

from microclip.report import RunFolder
from microclip.report.write import assemble, read_findings, write_page

from browsers import HOSTILE, Watched, chromium, luminance, needs_a_browser
from report_runs import EXAMPLES, described, ledger, sweep

LIMIT = 8_000_000

pytestmark = [needs_a_browser, pytest.mark.full]


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """A page with every section: a sweep, and a run with a ledger, examples and domains."""
    folder = tmp_path_factory.mktemp("everything")
    runs = [*sweep(folder / "sweep"), described(folder / "watched").path]
    path = folder / "page.html"
    write_page(assemble(read_findings(runs), "All there is"), path)
    return path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A page of data that tries to inject scripts and markup."""
    folder = tmp_path_factory.mktemp("hostile")
    run = RunFolder(
        folder / "run", name=HOSTILE, group=HOSTILE, settings={HOSTILE: HOSTILE}, command=HOSTILE
    )
    ledger(run.ledger, name=lambda i: f"{HOSTILE}{i}")
    for i in range(EXAMPLES):
        facts = {"label": f"{HOSTILE}{i % 3}", "truth": HOSTILE, "domain": f"{HOSTILE}{i % 2}"}
        run.example(f"{HOSTILE}{i}", text=f"{HOSTILE} {i} " + "x" * 5000, **facts)
    for step in (1, 2):
        run.log_all(step, {HOSTILE: step, "<a href='javascript:window.pwned=3'>go</a>": step})
    other = RunFolder(folder / "other", name=HOSTILE, microbatch_size=2, group=HOSTILE)
    for step in (1, 2):
        other.log_all(step, {HOSTILE: step})
    path = folder / "page.html"
    write_page(assemble(read_findings([run.path, other.path]), HOSTILE), path)
    return path


@pytest.fixture(scope="module")
def seen(browser: Browser, everything):
    """The page, opened once for all tests that do not change it."""
    context = browser.new_context(viewport={"width": 1100, "height": 900}, color_scheme="light")
    yield look_at(context.new_page(), everything)
    context.close()


def look_at(page: Page, path) -> Watched:
    """Open a page and wait until its figures are drawn."""
    watched = Watched(page)
    page.goto(path.as_uri())
    expect(page.locator(".plot:not(:has(svg .xy))")).to_have_count(0)
    return watched


@pytest.fixture
def opened(browser: Browser):
    contexts = []

    def open_page(path, width=1100, height=900, **options) -> Watched:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        return look_at(context.new_page(), path)

    yield open_page
    for context in contexts:
        context.close()


def test_it_opens_without_complaint_and_draws_every_figure(everything, seen):
    assert everything.stat().st_size < LIMIT
    marks = seen.ask(
        """[...document.querySelectorAll('.plot')].map(plot => [plot.dataset.figure,
            plot.querySelectorAll('.scatterlayer path, .barlayer path').length])"""
    )
    assert len(marks) == 8
    assert all(count > 0 for _, count in marks), marks
    assert seen.complaints == []


def test_it_can_load_nothing_and_run_no_other_script(everything, opened):
    seen = opened(everything)
    policy = seen.page.locator("meta[http-equiv=Content-Security-Policy]").get_attribute("content")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    seen.ask("fetch('https://example.com/').catch(() => {})")
    seen.ask(
        """(() => { const s = document.createElement('script'); s.textContent = 'window.pwned=1';
            document.body.append(s); })()"""
    )
    seen.ask("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"pwned=1\">')")
    seen.page.wait_for_timeout(100)
    assert seen.ask("window.pwned") is None
    refusals = [
        complaint for complaint in seen.complaints if "Content Security Policy" in complaint
    ]
    assert len(refusals) >= 2
    assert not any(c.startswith("request: https") for c in seen.complaints)


def column(seen: Watched, table: str, place: int) -> list[str]:
    return seen.ask(
        f"[...document.querySelectorAll('#{table}-rows tr')].map(r => r.cells[{place}].innerText)"
    )


def test_tables_are_sorted_by_their_headings(everything, opened):
    seen = opened(everything)
    heading = seen.page.locator("#scores-1 th", has_text="score")
    before = column(seen, "scores-1", 0)
    assert before == [str(rank) for rank in range(1, EXAMPLES + 1)]
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    scores = [float(text) for text in column(seen, "scores-1", 5)]
    assert scores == sorted(scores)
    assert seen.page.locator("#scores-1 th[aria-sort=none]").count() == 9
    heading.locator("button").press("Enter")  # by the keyboard, the other way round
    assert heading.get_attribute("aria-sort") == "descending"
    assert [float(text) for text in column(seen, "scores-1", 5)] == scores[::-1]
    ids = seen.page.locator("#scores-1 th", has_text="id")
    ids.locator("button").click()
    assert column(seen, "scores-1", 1) == [str(i) for i in range(EXAMPLES)]  # 10 after 9
    assert seen.complaints == []


def visible(seen: Watched) -> list[str]:
    return seen.ask(
        """[...document.querySelectorAll('#gallery-1 .tile')].filter(t => t.offsetParent)
            .map(t => t.querySelector('dd').innerText)"""
    )


def test_the_gallery_is_filtered_and_sorted(everything, opened):
    seen = opened(everything)
    controls = seen.page.locator("[data-controls=gallery-1]")
    assert visible(seen)[:3] == ["21", "18", "15"]
    controls.locator("input").fill("THE TEXT OF 2")
    assert visible(seen) == ["21"]
    assert controls.locator("[data-count]").inner_text() == f"1 of {EXAMPLES}"
    controls.locator("input").fill("")
    controls.locator("select[data-choice=label]").select_option("3")
    assert visible(seen) == ["3", "23", "13"]
    controls.locator("select[data-choice=domain]").select_option("even")
    assert visible(seen) == []
    controls.locator("select[data-choice=domain]").select_option("odd")
    controls.locator("select[data-choice=label]").select_option("")
    assert len(visible(seen)) == EXAMPLES // 2
    controls.locator("select[data-choice=domain]").select_option("")
    controls.locator("select[data-order]").select_option("label up")
    assert visible(seen)[:3] == ["0", "20", "10"]
    table = seen.page.locator("[data-controls=scores-1-rows]")
    table.locator("input").fill("even")
    shown = seen.ask(
        "[...document.querySelectorAll('#scores-1-rows tr')].filter(r => !r.hidden).length"
    )
    assert shown == EXAMPLES // 2
    assert seen.complaints == []


def test_a_long_gallery_is_shown_in_part_until_asked(everything, seen, opened, tmp_path):
    assert seen.page.locator("[data-more]").is_hidden()
    html = everything.read_text().replace('data-at-first="24"', 'data-at-first="5"')
    (tmp_path / "many.html").write_text(html)
    many = opened(tmp_path / "many.html")
    assert len(visible(many)) == 5
    many.page.get_by_role("button", name="Show all 24").click()
    assert len(visible(many)) == 24
    assert many.page.locator("[data-more]").is_hidden()


def test_other_metrics_can_be_chosen(seen):
    title = seen.page.locator("[data-figure=curves] .ytitle")
    expect(title).to_have_text("validation_accuracy")
    seen.page.locator("select[data-for=curves]").select_option(label="loss")
    expect(title).to_have_text("loss")
    seen.page.locator("select[data-for=curves]").select_option(label="validation_accuracy")
    assert seen.complaints == []


def colours(seen: Watched) -> tuple[str, str]:
    background = seen.ask("getComputedStyle(document.body).backgroundColor")
    ink = seen.ask("getComputedStyle(document.querySelector('.plot .xtitle')).fill")
    return background, ink


PAIRS = {  # texts and their backgrounds
    "body": "body",
    ".note": "body",
    "figcaption": "body",
    "nav a": "body",
    "thead th": "body",
    ".tile dt": ".tile",
    "mark": "mark",
    "select": "select",
}


def contrasts(seen: Watched) -> dict[str, float]:
    found = {}
    for text, ground in PAIRS.items():
        shades = [
            seen.ask(f"getComputedStyle(document.querySelector('{selector}')).{what}")
            for selector, what in ((text, "color"), (ground, "backgroundColor"))
        ]
        dark, light = sorted(map(luminance, shades))
        found[text] = (light + 0.05) / (dark + 0.05)
    return found


def test_themes_follow_the_system_and_the_button(everything, opened):
    light, dark = opened(everything, color_scheme="light"), opened(everything, color_scheme="dark")
    white, black = colours(light), colours(dark)
    assert white == ("rgb(255, 255, 255)", "rgb(31, 35, 40)")
    assert black == ("rgb(22, 25, 29)", "rgb(230, 232, 235)")
    for theme in (light, dark):
        assert min(contrasts(theme).values()) >= 4.5, contrasts(theme)  # required by WCAG AA
    light.page.get_by_role("button", name="Use dark colors").click()
    dark.page.get_by_role("button", name="Use light colors").click()
    assert (colours(light), colours(dark)) == (black, white)
    dark.page.get_by_role("button", name="Use dark colors").click()
    assert colours(dark) == black
    assert light.complaints == dark.complaints == []


@pytest.mark.parametrize("name", ["everything", "hostile"])
def test_a_phone_scrolls_only_vertically(name, opened, request):
    seen = opened(request.getfixturevalue(name), width=390, height=844, has_touch=True)
    assert seen.ask("document.scrollingElement.scrollWidth") <= 390
    beyond = seen.ask(
        """[...document.querySelectorAll('main *')].filter(e =>
            !e.closest('.scroll, svg, .plot, nav ul') &&
            e.getBoundingClientRect().right > 391).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert beyond == []
    assert seen.complaints == []


def test_it_prints_in_light_colours_with_all_of_the_gallery(everything, opened):
    seen = opened(everything, color_scheme="dark")
    seen.ask("dispatchEvent(new Event('beforeprint'))")
    seen.page.emulate_media(media="print")
    assert seen.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not seen.page.locator("#theme").is_visible()
    assert not seen.page.locator(".controls").first.is_visible()
    assert len(visible(seen)) == EXAMPLES
    assert seen.page.pdf().startswith(b"%PDF")
    seen.page.emulate_media(media="screen")
    seen.ask("dispatchEvent(new Event('afterprint'))")
    assert colours(seen)[0] == "rgb(22, 25, 29)"
    assert seen.complaints == []


def test_pictures_sounds_and_texts_are_shown(seen):
    sizes = seen.ask("[...document.querySelectorAll('.tile img')].map(i => i.naturalWidth)")
    assert sizes == [8] * 8
    assert (
        seen.ask("getComputedStyle(document.querySelector('.tile img')).imageRendering")
        == "pixelated"
    )
    seconds = seen.ask(
        """new Promise(done => { const a = document.querySelector('.tile audio');
            a.onloadedmetadata = () => done(a.duration); a.onerror = () => done(-1); a.load();
            a.preload = 'metadata'; })"""
    )
    assert seconds == pytest.approx(0.05, abs=0.01)
    assert seen.page.locator(".tile .text", has_text="the text of 21").count() == 1
    assert seen.complaints == []


def test_it_is_accessible(seen):
    assert seen.ask("document.documentElement.lang") == "en"
    levels = [
        int(level)
        for level in seen.ask("[...document.querySelectorAll('h1,h2,h3')].map(h => h.tagName[1])")
    ]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    for nameless in (
        "img:not([alt])",
        "th:not([scope])",
        ".plot:not([aria-label])",
        "audio:not([aria-label])",
        "svg.sparkline:not([aria-label])",
        "table:not([aria-labelledby])",
    ):
        assert seen.page.locator(nameless).count() == 0, nameless
    assert seen.ask("[...document.querySelectorAll('input,select')].every(e => e.labels.length)")
    ids = seen.ask("[...document.querySelectorAll('[id]')].map(e => e.id).filter(i => i)")
    assert len(ids) == len(set(ids))
    links = seen.ask("[...document.querySelectorAll('nav a')].map(a => a.getAttribute('href'))")
    assert all(link.startswith("#") and link[1:] in ids for link in links)


def test_hostile_data_is_shown_and_does_nothing(hostile, opened):
    seen = opened(hostile)
    assert seen.page.title() == HOSTILE
    assert seen.page.locator("h1").inner_text() == HOSTILE
    assert HOSTILE in seen.page.locator(".tile .text").first.inner_text()
    assert HOSTILE in seen.page.locator(".tile .label").first.inner_text()
    for select in seen.page.locator("select:visible").all():
        for value in select.locator("option").evaluate_all("os => os.map(o => o.value)"):
            select.select_option(value=value)
    for button in seen.page.locator("th button").all():
        button.click()
    for plot in seen.page.locator(".plot").all():
        plot.hover()
    assert seen.page.locator("main script, main a[href^='javascript'], main img").count() == 0
    assert seen.ask("document.querySelectorAll('svg a').length") == 0
    legends = seen.ask("[...document.querySelectorAll('.legendtext')].map(t => t.textContent)")
    assert any("<script>" in text for text in legends)
    assert seen.ask("window.pwned") is None
    assert seen.complaints == []


def test_without_scripts_only_the_figures_are_missing(everything, browser):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(everything.as_uri())
    assert page.get_by_text("The figures need JavaScript").is_visible()
    assert page.locator(".tile").count() == EXAMPLES
    assert page.locator(".tile").last.is_visible()
    assert not page.locator(".controls").first.is_visible()
    context.close()
