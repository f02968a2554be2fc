"""results.json: everything that follows from the records, for other programs.

The same records give the same bytes: it has no dates, machines or folder names except those in the
records.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from microclip.files import write_whole
from microclip.report.statistics import Estimate
from microclip_lab.reproduction import record_tables
from microclip_lab.reproduction.claims import Part
from microclip_lab.reproduction.effects import Effect
from microclip_lab.reproduction.record_tables import is_default_plan
from microclip_lab.reproduction.records import Records
from microclip_lab.reproduction.study import Study
from microclip_lab.reproduction.tasks import Arm, Task
from microclip_lab.reproduction.theory_part import failing_statements, rate_tables
from microclip_lab.reproduction.verdicts import ClaimVerdict, PartVerdict, controls, judge, told

FILE = "results.json"
FORMAT = 1
COMMAND = "microclip reproduce --out results"


def write_results(study: Study, records: Records, out: Path) -> Path:
    """Write out/results.json."""
    path = out / FILE
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_plain(summary(study, records)), indent=1, allow_nan=False)
    write_whole(path, f"{text}\n".encode())
    return path


def summary(study: Study, records: Records) -> dict[str, Any]:
    """Return verdicts, effects and tables, with the ids of the runs they were made of."""
    return {
        "format": FORMAT,
        "command": COMMAND,
        "plan": "default" if is_default_plan(study) else "shorter",
        "runs": progress(study, records),
        "core_seconds": core_seconds(records),
        "made_with": environments(records),
        "claims": [_claim(found) for found in judge(study, records)],
        "controls": [_part(found) for found in controls(study, records)],
        "tasks": {task.name: _task(study, records, task) for task in study.tasks},
        "theory": {
            "rates": [asdict(table) | {"case": table.case.name} for table in rate_tables()],
            "statements_that_fail": [asdict(claim) for claim in failing_statements()],
        },
    }


def progress(study: Study, records: Records) -> dict[str, int]:
    """Return how many of the runs known so far are done."""
    expected = study.expected(records)
    return {
        "done": sum(job in records for job in expected),
        "expected": len(expected),
        "diverged": sum(bool(record.diverged) for record in records.values()),
    }


def core_seconds(records: Records) -> float:
    """Return the total duration of all runs, each on one core."""
    return round(math.fsum(record.made.get("seconds", 0.0) for record in records.values()), 1)


def environments(records: Records) -> list[dict[str, Any]]:
    """Return the environments of the runs: versions, machine classes and counts."""
    kinds = Counter(
        tuple(sorted((str(k), str(v)) for k, v in record.made.items() if k != "seconds"))
        for record in records.values()
    )
    return [{**dict(kind), "runs": count} for kind, count in sorted(kinds.items())]


def _claim(found: ClaimVerdict) -> dict[str, Any]:
    claim = found.claim
    return {
        "id": claim.id,
        "title": claim.title,
        "by": claim.by,
        "source": claim.source,
        "there": claim.there,
        "verdict": found.verdict,
        "sentence": found.sentence,
        "parts": [_part(part) for part in found.parts],
        "also": [_part(part) for part in found.also],
    }


def _part(found: PartVerdict) -> dict[str, Any]:
    part: Part = found.part
    return {
        "about": part.about,
        "quantity": {"kind": type(part.quantity).__name__, **asdict(part.quantity)},
        "expects": part.expects,
        "margin": part.margin,
        "verdict": found.verdict,
        "effect": effect_json(found.effect),
    }


def effect_json(effect: Effect | None) -> dict[str, Any] | None:
    """Return an effect with its values by seed and the ids of its runs."""
    if effect is None:
        return None
    return {**asdict(effect), "said": told(effect)}


def _task(study: Study, records: Records, task: Task) -> dict[str, Any]:
    return {
        "about": task.about,
        "figure": task.figure,
        "lower_is_better": task.recipe.lower_is_better,
        "batch_size": task.training.batch_size,
        "steps": task.training.steps,
        "seeds": list(record_tables.planned(task)),
        "arms": [_row(row) for row in record_tables.arm_rows(study, records, task)],
        "tuning": [asdict(trial) for trial in record_tables.trials(study, records, task)],
        "curves": record_tables.curves(study, records, task),
        "moments": record_tables.moments(study, records, task),
        "domain_weights": record_tables.domain_weights(study, records, task),
        "ratios": [asdict(ratio) for ratio in record_tables.ratios(study, records, task)],
    }


def _row(row: record_tables.ArmRow) -> dict[str, Any]:
    arm: Arm = row.arm
    return {
        "arm": arm.name,
        "about": arm.about,
        "b": row.size,
        "B": row.batch,
        "tuned": arm.tuned,
        "value": row.value,
        "learning_rate": row.rate,
        "diverged_with_every_value": row.is_lost,
        "figures": row.figures,
        "gain": effect_json(row.gain),
        "last_gain": effect_json(row.last_gain),
        "diverged": row.diverged,
        "records": row.records,
    }


def _plain(value: Any) -> Any:
    """Return a value for JSON, with null for non-finite numbers."""
    if isinstance(value, Estimate):
        return _plain(asdict(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
