"""The settings a sweep was started with, so that it is never resumed with others by accident.

A sweep may be resumed with other sizes, rules and seeds: they decide which runs there are, not what
a run does, and finished runs still count. In a race they decide which candidates continue, so they
may not change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna

from microclip.files import write_whole
from microclip_lab.sweep.config import SweepConfig
from microclip_lab.training.config import SettingError, Training
from microclip_lab.training.recipe import Recipe
from microclip_lab.training.run_logger import settings

SETUP = "setup"
OF_SWEEPS = ("learning_rates", "rate_scales", "tuning_seeds", "judge_by", "prune")
OF_RACES = ("sizes", "rules", "learning_rates", "rate_scales", "race_seeds", "budget")
OF_JOBS = ("microbatch_size", "rule")  # each job has its own


class ChangedError(SettingError):
    """A sweep is being resumed with other settings; the message lists them."""


def describe(recipe: Recipe[Any, Any], training: Training, config: SweepConfig) -> dict[str, Any]:
    """Return all settings that results depend on."""
    said = {"recipe": recipe.name, **settings(recipe, training), "seed": training.seed}
    said |= {name: getattr(config, name) for name in (OF_RACES if config.race else OF_SWEEPS)}
    # settings() drops these for plain training, but a sweep has them
    said |= {"engine": training.engine, "by_domain": training.by_domain}
    kept = {name: value for name, value in said.items() if name not in OF_JOBS}
    described: dict[str, Any] = json.loads(json.dumps(kept, default=_plain, sort_keys=True))
    return described


def check_setup(study: optuna.Study, out: Path, setup: Mapping[str, Any], name: str) -> None:
    """Record the settings of a new sweep in its storage and folder, or check them on resume."""
    file = out / f"{name}-setup.json"
    found = [(f"The study {study.study_name!r}", study.user_attrs.get(SETUP))]
    if file.exists():
        found.append((f"The {name} in {out}", json.loads(file.read_text(encoding="utf-8"))))
    for what, before in found:
        if before is not None and before != setup:
            raise ChangedError(
                f"{what} was started with other settings: "
                f"{'; '.join(differences(before, setup))}. Use the same options, or choose another "
                "folder (--out) and study."
            )
    if SETUP not in study.user_attrs:
        study.set_user_attr(SETUP, dict(setup))
    write_whole(file, (json.dumps(setup, indent=2) + "\n").encode())


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what has changed, in words.

    >>> differences({"steps": 10, "seed": 0}, {"steps": 20, "seed": 0})
    ['steps was 10 and is now 20']
    """
    return [
        f"{name} was {before.get(name)!r} and is now {now.get(name)!r}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)
