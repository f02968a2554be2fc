"""Which package imports which: one way only, and never a private name of another's.

Packages and top-level modules are the rooms of the library; imports inside functions and under
TYPE_CHECKING count as well, since they tie rooms together just the same.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY, LAB = ROOT / "src" / "microclip", ROOT / "lab" / "src" / "microclip_lab"

# `microclip/__init__.py` offers everything and is imported by nobody; the command knows all.
FRONT_DOORS = {"__init__", "__main__", "cli", "command_line", "commands"}


@cache
def imports(path):
    """Return (module, name or None) for every import in a file; relative ones are not used here."""
    return list(_imports(path))


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                yield node.module, alias.name


def room_of(module, package):
    """Return the first part of a module's name inside the package, None outside of it."""
    first, *rest = module.split(".")
    if first != package:
        return None
    return rest[0] if rest else "__init__"


def edges(folder):
    """Yield (room, module, name, file) for every import of the package's own modules."""
    package = folder.name
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        for module, name in imports(path):
            if module.split(".")[0] == package:
                if module == package and name is not None:  # from microclip import rules
                    inner = folder / name
                    if inner.is_dir() or inner.with_suffix(".py").exists():
                        module, name = f"{package}.{name}", None
                yield parts[0], module, name, path


def graph(folder):
    """Return which rooms each room imports."""
    found = {}
    for room, module, _, _ in edges(folder):
        other = room_of(module, folder.name)
        if room not in FRONT_DOORS and other not in (room, "__init__"):
            found.setdefault(room, set()).add(other)
    return found


def cycle_in(found):
    """Return a cycle of the graph, or nothing."""

    def visit(room, path):
        if room in path:
            return [*path[path.index(room) :], room]
        for other in sorted(found.get(room, ())):
            if cycle := visit(other, [*path, room]):
                return cycle
        return []

    return next((cycle for room in sorted(found) if (cycle := visit(room, []))), [])


def drawn(found):
    return "\n".join(f"{room} -> {', '.join(sorted(others))}" for room, others in found.items())


@pytest.mark.parametrize("folder", [LIBRARY, LAB], ids=lambda folder: folder.name)
def test_no_cycle_between_packages(folder):
    found = graph(folder)
    assert len(found) >= 4
    assert cycle_in(found) == [], drawn(found)


def test_a_cycle_would_be_found():
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


@pytest.mark.parametrize("folder", [LIBRARY, LAB], ids=lambda folder: folder.name)
def test_no_private_name_is_imported_across_modules(folder):
    private = [
        f"{path.relative_to(ROOT)}: {module}.{name or ''}"
        for _, module, name, path in edges(folder)
        if ((name or "").startswith("_") and not (name or "").startswith("__"))
        or any(part.startswith("_") and part != "__init__" for part in module.split("."))
    ]
    assert private == []


def test_the_library_knows_nothing_of_the_laboratory():
    """But that it exists: its old place in `microclip.theory`, and the commands it adds."""
    found = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in LIBRARY.rglob("*.py")
        for module, _ in imports(path)
        if module.split(".")[0] == "microclip_lab"
    ]
    assert found == []


@pytest.mark.parametrize("room", ["rules", "outcome", "batches", "microbatches", "multitensor"])
def test_the_core_knows_nothing_of_engines(room):
    core = {"batches", "microbatches", "multitensor", "outcome", "rules"}
    assert graph(LIBRARY).get(room, set()) <= core


def test_engines_know_nothing_of_ranks_or_of_who_reads_the_outcome():
    core = {"batches", "microbatches", "multitensor", "outcome", "rules"}
    assert graph(LIBRARY)["engines"] <= {*core, "losses", "user_warnings", "wrappers"}
