"""The code on the README and on every documentation page runs, and links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "RELEASING", "SECURITY")]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)")  # what lies in this repository
IMAGE = re.compile(r"^```{image} (\S+)$", re.MULTILINE)


def name(page):
    return page.relative_to(ROOT).as_posix()


def anchors(page):
    """Return what GitHub and Sphinx call the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if BLOCK.search(p.read_text()) and not p.stem.startswith("tutorial-")],
    ids=name,
)
def test_code_on_the_page_runs(page):
    """Block after block, as one script. What tutorials print is compared, too: test_tutorials."""
    text = page.read_text()
    namespace = {"__name__": "__page__"}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        code = compile("\n" * line + block[1], str(page), "exec")  # errors show the page's lines
        exec(code, namespace)
    assert "microclip" in namespace


def test_the_first_lines_of_the_readme_run(tmp_path, monkeypatch, capsys):
    """On the data and with the model of find-bad-data.md, whose result they show."""
    monkeypatch.chdir(tmp_path)
    setup = BLOCK.search((ROOT / "docs" / "find-bad-data.md").read_text())[1]
    diff = re.search(r"^```diff\n(.*?)^```$", PAGES[0].read_text(), re.MULTILINE | re.DOTALL)[1]
    lines = "".join(f"{line[2:]}\n" for line in diff.splitlines() if not line.startswith("-"))
    namespace = {"__name__": "__page__"}
    exec(setup[: setup.index("loader = ")], namespace)
    exec(f"from torch.nn.functional import cross_entropy\n{lines}", namespace)
    shown = re.compile(r"Issues\((\d+) of 1797 examples flagged, about (\d+)")
    said = capsys.readouterr().out
    printed, promised = (map(int, shown.search(text).groups()) for text in (said, diff))
    assert list(printed) == pytest.approx(list(promised), abs=8)  # rounding, amplified
    namespace["ledger"].close()


def test_pages_that_promise_code_have_it():
    with_code = {name(page) for page in PAGES if BLOCK.search(page.read_text())}
    promised = ("quickstart", "when-to-use", "semantics", "faq", "writing-a-rule")
    assert with_code >= {"README.md", *(f"docs/{page}.md" for page in promised)}


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text())
    links = LINK.findall(text)
    for path, anchor in links:
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{path}#{anchor}"
    for image in IMAGE.findall(page.read_text()):
        assert (page.parent / image).exists(), image
    assert links or name(page) != "README.md"


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    listed = re.findall(r"^[a-z-]+$", index, re.MULTILINE)
    assert sorted(listed) == [page.stem for page in PAGES[1:] if page.stem != "index"]


def test_readme_has_the_two_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert any(line.startswith("make demo ") for line in lines)
    assert any(line.startswith("make test ") for line in lines)


def test_places_named_for_contributors_exist():
    bases = [ROOT, ROOT / "src/microclip", ROOT / "src/microclip/engines/single_pass"]
    bases.append(ROOT / "lab/src/microclip_lab")
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:[\w-]+/)+[\w.-]*|[\w-]+\.(?:py|c|md|txt))`", text)
    assert len(named) > 40
    for place in named:
        assert any((base / place).exists() for base in bases), place
