"""The code on the README and on every documentation page runs, block after block, as one script."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=name
)
def test_code_on_the_page_runs(page):
    text = page.read_text()
    namespace = {"__name__": "__page__"}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        code = compile(
            "\n" * line + block[1], str(page), "exec"
        )  # errors show the page's own lines
        exec(code, namespace)
    assert "microclip" in namespace


def test_the_pages_that_promise_code_have_it():
    with_code = {name(page) for page in PAGES if BLOCK.search(page.read_text())}
    assert with_code >= {"README.md", *(f"docs/{p}.md" for p in ("quickstart", "semantics", "faq"))}
    assert "docs/writing-a-rule.md" in with_code


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_pages_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+\.md)", page.read_text())
    for link in links:
        assert (page.parent / link).exists(), link
    assert links or name(page) != "README.md"
