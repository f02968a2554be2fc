"""Make the notebook of the tutorial: `python examples/notebooks/make_notebooks.py`.

A notebook has the text, code and output of a page in docs/, which the tests run; another test
fails if it is not up to date. With `--run`, all tutorials are run first, and what they print is
written into their pages.
"""

import io
import json
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
PAGES = {"find_bad_labels.ipynb": "tutorial-labels.md"}

CODE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"^```\{image\} (\S+)\n:alt: (.*)\n```$", re.MULTILINE)
LINK = re.compile(r"\]\((?![a-z]+:)([^)]+)\)")


def cells(page: str) -> list[tuple[str, str, str]]:
    """Return the parts of a page as (kind, source, output)."""
    found, end = [], 0
    for block in CODE.finditer(page):
        found.append(("markdown", page[end : block.start()].strip(), ""))
        found.append(("code", block[1].strip(), block[2] or ""))
        end = block.end()
    found.append(("markdown", page[end:].strip(), ""))
    return [part for part in found if part[1]]


def notebook(page: str) -> dict[str, Any]:
    """Convert a page to a Jupyter notebook."""
    made = []
    for number, (kind, source, output) in enumerate(cells(page)):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        if kind == "code":
            text = {"name": "stdout", "output_type": "stream", "text": _lines(output)}
            cell |= {"execution_count": None, "outputs": [text] if output else []}
        else:
            source = LINK.sub(_from_here, IMAGE.sub(r"![\2](\1)", source))
        made.append(cell | {"source": _lines(source)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": made, "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def written(name: str) -> str:
    """Return what the file of a notebook holds."""
    page = (DOCS / PAGES[name]).read_text(encoding="utf-8")
    return json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n"


def rerun(page: str) -> str:
    """Return a page with what its code prints now."""
    namespace: dict[str, Any] = {"__name__": "__page__"}

    def with_output(block: re.Match[str]) -> str:
        said = io.StringIO()
        with redirect_stdout(said):
            exec(block[1], namespace)
        shown = f"\n```text\n{said.getvalue()}```\n" if said.getvalue() else ""
        return f"```python\n{block[1]}```\n{shown}"

    return CODE.sub(with_output, page)


def _from_here(link: re.Match[str]) -> str:
    """Return a link of a page in docs/ as one from this folder."""
    inside = link[1].removeprefix("../examples/notebooks/")
    return f"]({inside})" if inside != link[1] else f"](../../docs/{link[1]})"


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--run"]:
        for path in sorted(DOCS.glob("tutorial-*.md")):
            path.write_text(rerun(path.read_text(encoding="utf-8")), encoding="utf-8")
            print(path)
    for name in PAGES:
        (HERE / name).write_text(written(name), encoding="utf-8")
        print(HERE / name)
