"""Finding the recipe that a user names: a built-in one, or a class in a Python file."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from microclip_lab.training.config import SettingError
from microclip_lab.training.recipe import Recipe

BUILT_IN = {
    "vision": "microclip_lab.vision.recipe:Vision",
    "speech": "microclip_lab.speech.recipe:Speech",
    "language": "microclip_lab.language.recipe:Language",
}

RecipeClass = type[Recipe[Any, Any]]


def find_recipe(name: str) -> RecipeClass:
    """Return the recipe class for "vision", "mine.py", or "mine.py:Class" if a file has several."""
    if name in BUILT_IN:
        module, _, cls = BUILT_IN[name].partition(":")
        found: RecipeClass = getattr(importlib.import_module(module), cls)
        return found
    file, _, wanted = name.partition(":")
    if not file.endswith(".py"):
        raise SettingError(
            f"There is no recipe {name!r}. Choose {', '.join(BUILT_IN)}, or give a Python file "
            "with your own, such as mine.py."
        )
    if not Path(file).is_file():
        raise SettingError(f"There is no recipe file {file}.")
    return _recipe_in(_imported(Path(file)), file, wanted)


def _imported(file: Path) -> ModuleType:
    # the path is part of the name, so that files of the same name do not collide
    place = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]
    name = f"microclip_recipe_{file.stem}_{place}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and data loader processes look it up there
    sys.path.insert(0, str(file.resolve().parent))  # so that it can import its neighbors
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(file.resolve().parent))
    return module


def _recipe_in(module: ModuleType, file: str, wanted: str) -> RecipeClass:
    recipes: dict[str, RecipeClass] = {
        name: cls
        for name, cls in vars(module).items()
        if inspect.isclass(cls)
        and issubclass(cls, Recipe)
        and cls.__module__ == module.__name__
        and not inspect.isabstract(cls)
    }
    if wanted:
        if wanted not in recipes:
            raise SettingError(f"{file} has no recipe {wanted!r}; it has {_listed(recipes)}.")
        return recipes[wanted]
    if len(recipes) != 1:
        raise SettingError(
            f"{file} should define one recipe, a subclass of microclip_lab.training.recipe.Recipe "
            f"that implements all its methods, but has {_listed(recipes)}."
            + (f" Choose one: {file}:{next(iter(recipes))}" if recipes else "")
        )
    return next(iter(recipes.values()))


def _listed(recipes: dict[str, RecipeClass]) -> str:
    return ", ".join(recipes) or "none"
