"""Run folders for tests: a sweep over b and seeds, and a ledger with examples of every kind."""

import io
import math
import struct
import wave
from pathlib import Path

import numpy as np

from microclip.report import RunFolder
from microclip.report.blocks import Page, Paragraph
from microclip.report.write import assemble, read_findings

from ledgers import Row, write

STEPS = 40
EXAMPLES = 24  # 0 to 23; every third label is wrong, and its loss is high


def tone() -> bytes:
    """Return a short sound."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        samples = (int(9000 * math.sin(i / 3)) for i in range(400))
        file.writeframes(b"".join(struct.pack("<h", sample) for sample in samples))
    return buffer.getvalue()


def ledger(path: Path, name=str, domain=lambda i: None, steps: int = STEPS) -> Path:
    """Write a ledger of 24 examples, named by `name`, with high losses for wrong labels."""
    rows = []
    for step in range(steps):
        order = np.random.default_rng(step).permutation(EXAMPLES)
        groups = [order[start : start + 4] for start in range(0, EXAMPLES, 4)]
        if domain(0) is not None:
            order = np.array(sorted(order, key=lambda i: domain(int(i))))
            kinds = dict.fromkeys(domain(int(i)) for i in order)
            groups = [np.array([i for i in order if domain(int(i)) == kind]) for kind in kinds]
        rows.append(
            [
                Row(
                    ids=[name(int(i)) for i in group],
                    norm=1.0 + float(sum(int(i) % 3 == 0 for i in group)) + step / 100,
                    weight=1 / (1.0 + float(sum(int(i) % 3 == 0 for i in group))),
                    domain=domain(int(group[0])),
                    losses=[3.0 + i / 100 if i % 3 == 0 else 0.2 + i / 100 for i in group],
                )
                for group in groups
            ]
        )
    return write(path, rows)


def sweep(path: Path, sizes=(None, 2, 4), seeds=(0, 1, 2)) -> list[Path]:
    """Write a run for each size and seed: b = 4 is about 0.02 better than plain."""
    folders = []
    for seed in seeds:
        for b in sizes:
            name = f"{'plain' if b is None else f'b{b}'}-{seed}"
            run = RunFolder(
                path / name,
                microbatch_size=b,
                seed=seed,
                group="sweep",
                settings={"lr": 0.1, "data": {"noise": 0.2}},
            )
            gain = {4: 0.02 + 0.001 * seed}.get(b or 0, 0.0)
            for step in range(10, STEPS + 1, 10):
                run.log(step, loss=1 / step, validation_accuracy=0.8 + step / 1000 + gain)
            run.log(STEPS, test_accuracy=0.9 + 0.01 * seed + gain)
            folders.append(run.path)
    return folders


def described(path: Path, **options) -> RunFolder:
    """Write a run with a ledger, its examples images, sounds and texts in turn."""
    run = RunFolder(path, microbatch_size=4, seed=0, group="sweep", **options)
    ledger(run.ledger, name=int)
    for i in range(EXAMPLES):
        shown = [
            {"image": np.full((8, 8), i * 10)},
            {"audio": tone()},
            {"text": f"the text of {i}"},
        ][i % 2 if i % 3 else 2]
        truth = (i + 1) % 10 if i % 3 == 0 else i % 10
        run.example(i, label=i % 10, truth=truth, domain="even" if i % 2 == 0 else "odd", **shown)
    run.log(STEPS, test_accuracy=0.95)
    return run


def blocks(page: Page, kind: type) -> list:
    return [b for section in page.sections for b in section.blocks if isinstance(b, kind)]


def page_of(*paths: Path, gallery: int = 60) -> Page:
    return assemble(read_findings(list(paths), gallery), "A title")


def said(page: Page) -> str:
    return "\n".join([*page.verdict, *(block.text for block in blocks(page, Paragraph))])
