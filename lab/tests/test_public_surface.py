"""The lab uses the library as any other package would: public modules and public names only."""

import ast
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "microclip_lab"
PUBLIC = {
    "microclip",
    *(f"microclip.{name}" for name in ("cli", "draggers", "files", "guard", "ledger", "outcome")),
    *(f"microclip.{name}" for name in ("probing", "report", "rules", "state_files")),
    *(f"microclip.report.{name}" for name in ("blocks", "comparison", "folder", "page")),
    *(f"microclip.report.{name}" for name in ("runs", "statistics", "traces")),
}


def imported(source):
    """Yield every module of the library that is imported, with the name taken from it, if any."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.module, alias.name) for alias in node.names)


def is_public(module, name):
    """Return whether an import is of the public surface, or not of the library at all."""
    if module.split(".")[0] != "microclip":
        return True
    known = module in PUBLIC or module.startswith("microclip.integrations")
    return known and not any(part.startswith("_") for part in (*module.split("."), name or ""))


@pytest.mark.parametrize(
    "path", sorted(SOURCES.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCES))
)
def test_only_public_parts_of_the_library_are_imported(path):
    found = imported(path.read_text(encoding="utf-8"))
    assert [each for each in found if not is_public(*each)] == []


@pytest.mark.parametrize(
    ("source", "public"),
    [
        ("import microclip", True),
        ("from microclip.rules import MinNorm", True),
        ("from microclip.integrations.accelerate import AcceleratedClipper", True),
        ("import torch._dynamo", True),
        ("from microclip.engines.stream import Stream", False),
        ("import microclip.engines", False),
        ("from microclip.rules import _weights", False),
        ("def f():\n    from microclip.probing.gram import gram_of", False),
    ],
)
def test_what_counts_as_public(source, public):
    assert all(is_public(*each) for each in imported(source)) is public
