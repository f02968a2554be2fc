"""The tutorials run, and print what they say they print; the notebook is the page."""

import importlib.util
import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("tutorial-*.md"))
MAKER = ROOT / "examples" / "notebooks" / "make_notebooks.py"
NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?)( ?%)?")

spec = importlib.util.spec_from_file_location("make_notebooks", MAKER)
make_notebooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_notebooks)


def expect_output(said, shown):
    """Compare what was printed with the page: the same words, and numbers that are close.

    Another processor rounds differently, which training amplifies.
    """
    assert len(said.splitlines()) == len(shown.splitlines()), said
    for line, expected in zip(said.splitlines(), shown.splitlines(), strict=True):
        if "called" in expected or "->" in expected:  # which suspects come first
            continue
        assert NUMBER.sub("#", line) == NUMBER.sub("#", expected)
        for (number, _), (other, percent) in zip(
            NUMBER.findall(line), NUMBER.findall(expected), strict=True
        ):
            found, on_page = (float(text.replace(",", "")) for text in (number, other))
            close = {"abs": 4} if percent else {"rel": 0.35, "abs": 6}
            assert found == pytest.approx(on_page, **close), (line, expected)


def run(parts, name):
    namespace = {"__name__": "__page__"}
    for source, output in parts:
        said = io.StringIO()
        with redirect_stdout(said):
            exec(compile(source, name, "exec"), namespace)
        expect_output(said.getvalue(), output)
    return namespace


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, marks=[pytest.mark.full] if "speech" in p.stem else [], id=p.stem)
        for p in PAGES
    ],
)
def test_the_tutorial_runs(page):
    parts = make_notebooks.cells(page.read_text())
    code = [(source, output) for kind, source, output in parts if kind == "code"]
    assert len(code) >= 4
    assert run(code, str(page))["found"].flagged_count > 10


def test_a_wrong_output_would_be_noticed():
    expect_output("94.1 % of 1,297\n", "94.0 % of 1,300\n")
    for said in ("89 % of 1,300\n", "94 % of 800\n", "94 % in 1,300\n", "94 % of 1,300\n\n", ""):
        with pytest.raises(AssertionError):
            expect_output(said, "94 % of 1,300\n")


@pytest.mark.parametrize("name", make_notebooks.PAGES)
def test_the_notebook_is_the_page(name):
    """And the page is run, so the notebook is, too."""
    stored = (MAKER.parent / name).read_text()
    assert stored == make_notebooks.written(name), f"out of date: python {MAKER}"
    content = json.loads(stored)
    page = (make_notebooks.DOCS / make_notebooks.PAGES[name]).read_text()
    code = ["".join(c["source"]) for c in content["cells"] if c["cell_type"] == "code"]
    assert code == [source for kind, source, _ in make_notebooks.cells(page) if kind == "code"]
    for cell in content["cells"]:
        if cell["cell_type"] == "markdown":
            for link in make_notebooks.LINK.findall("".join(cell["source"])):
                assert (MAKER.parent / link.partition("#")[0]).exists(), link


@pytest.mark.full
@pytest.mark.parametrize("name", make_notebooks.PAGES)
def test_the_notebook_runs(name):
    content = json.loads((MAKER.parent / name).read_text())
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    outputs = ["".join(t for o in cell["outputs"] for t in o["text"]) for cell in cells]
    run(zip(["".join(cell["source"]) for cell in cells], outputs, strict=True), name)
