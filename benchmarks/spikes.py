"""How often `microclip.spikes` names the row that broke a step: 20 planted rows per run.

    python benchmarks/spikes.py --seeds 5

A row is huge (raw bytes, another unit, a control character over and over), corrupt (noise), or from
another domain (an inverted picture, wines among patients, hexadecimal digits among English text).
Pictures also get another label: a picture that is only brighter is predicted just as well, so that
nothing breaks. A row is found if its step is among the spikes, and it is among the first three rows
of the step.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_diabetes, load_digits, load_wine  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn import functional as F

import microclip

KINDS = ("huge", "corrupt", "other domain")
STEPS, FIRST, EVERY = 440, 40, 20  # 20 of 440 steps
LENGTH = 48  # of a text, in characters
DOCS = Path(__file__).parents[1] / "docs"


class Digits:
    """Pictures of digits, as rows of 64 pixels from 0 to 1."""

    rows = 32

    def __init__(self) -> None:
        pixels, labels = load_digits(return_X_y=True)
        self.x, self.y = torch.tensor(pixels / 16).float(), torch.tensor(labels)

    def batch(self, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(self.x), (self.rows,), generator=draw)
        return self.x[rows].clone(), self.y[rows].clone()

    def spoil(self, batch: tuple[Tensor, Tensor], row: int, kind: str, noise: Tensor) -> None:
        x, y = batch
        spoiled = {"huge": 255 * x[row], "corrupt": 30 * noise, "other domain": 10 - 10 * x[row]}
        x[row] = spoiled[kind]
        y[row] = (y[row] + 1 + int(1e4 * noise[0].abs()) % 9) % 10

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Patients:
    """Ten measurements of each patient, and how the disease went on; standardized."""

    rows = 32

    def __init__(self) -> None:
        x, y = load_diabetes(return_X_y=True, scaled=False)
        self.raw = torch.tensor(x).float()
        self.x = (self.raw - self.raw.mean(0)) / self.raw.std(0)
        y = torch.tensor(y).float()
        self.y = (y - y.mean()) / y.std()
        self.others = torch.tensor(load_wine(return_X_y=True)[0][:, :10]).float()

    def batch(self, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        self.chosen = torch.randint(len(self.x), (self.rows,), generator=draw)
        return self.x[self.chosen].clone(), self.y[self.chosen].clone()

    def spoil(self, batch: tuple[Tensor, Tensor], row: int, kind: str, noise: Tensor) -> None:
        other = self.others[int(1e4 * noise[0].abs()) % len(self.others)]
        raw = self.raw[self.chosen[row]]
        batch[0][row] = {"huge": raw, "corrupt": 30 * noise[:10], "other domain": other}[kind]

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]).squeeze(1) - batch[1]).square()


class Text:
    """Pieces of this project's documentation, as bytes below 128."""

    rows = 8  # a row's loss is the mean of 47 characters: one of 32 would hardly be seen

    def __init__(self) -> None:
        text = "".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
        self.text = torch.tensor([min(ord(letter), 127) for letter in text])

    def batch(self, draw: torch.Generator) -> Tensor:
        starts = torch.randint(len(self.text) - LENGTH, (self.rows,), generator=draw)
        return torch.stack([self.text[start : start + LENGTH] for start in starts])

    def spoil(self, batch: Tensor, row: int, kind: str, noise: Tensor) -> None:
        codes = (1e4 * noise[:LENGTH].abs()).long()
        hexadecimal = torch.tensor([ord(letter) for letter in "0123456789abcdef"])
        spoiled = {
            "huge": torch.full((LENGTH,), 1),
            "corrupt": codes % 128,
            "other domain": hexadecimal[codes % 16],
        }
        batch[row] = spoiled[kind]

    def losses(self, model: nn.Module, batch: Tensor) -> Tensor:
        found = F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:], reduction="none")
        return found.mean(1)


class Characters(nn.Module):
    """A recurrent model of characters."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Embedding(128, 32), nn.Linear(64, 128)
        self.memory = nn.GRU(32, 64, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the next character."""
        found: Tensor = self.write(self.memory(self.read(x))[0])
        return found


MODELS = {
    "digits, two layers": (
        Digits,
        lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    ),
    "digits, convolution": (
        Digits,
        lambda: nn.Sequential(
            *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(288, 10)),
        ),
    ),
    "patients, two layers": (
        Patients,
        lambda: nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)),
    ),
    "text, recurrent": (Text, Characters),
}


def train(folder: str, name: str, seed: int, norms: bool) -> dict[int, tuple[str, str]]:
    """Train with planted rows; return kind and id of the one in each step that has one."""
    data, model = MODELS[name][0](), MODELS[name][1]
    torch.manual_seed(seed)
    trained = model()
    optimizer = torch.optim.Adam(trained.parameters(), lr=2e-3)
    draw = torch.Generator().manual_seed(seed)
    planted = {}
    with microclip.Ledger(folder) as ledger:
        rule = microclip.rules.Keep()
        clipper = microclip.Clipper(trained, 1, rule=rule, ledger=ledger) if norms else None
        for step in range(STEPS):
            batch, ids = data.batch(draw), [f"{step}:{row}" for row in range(data.rows)]
            if step >= FIRST and step % EVERY == 0:
                row, kind = step % data.rows, KINDS[step // EVERY % len(KINDS)]
                data.spoil(batch, row, kind, torch.randn(64, generator=draw))
                planted[step] = kind, ids[row]
            optimizer.zero_grad()
            if clipper is None:
                losses = data.losses(trained, batch)
                losses.mean().backward()
                ledger.record(ids, losses)
            else:
                clipper.backward(lambda batch: data.losses(trained, batch), batch, ids=ids)
            nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
    return planted


def found(name: str, seed: int, norms: bool) -> dict[str, list[bool]]:
    """Return for each kind whether its rows were found."""
    with tempfile.TemporaryDirectory() as folder:
        planted = train(folder, name, seed, norms)
        spikes = {spike.step: spike for spike in microclip.spikes(folder, most=STEPS).found}
    result: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    for step, (kind, guilty) in planted.items():
        first = spikes[step].rows["id"].to_pylist()[:3] if step in spikes else []
        result[kind].append(guilty in first)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    print("| model | recorded | found of 20, each seed | huge | corrupt | other domain |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in MODELS:
        for norms in (False, True):
            runs = [found(name, seed, norms) for seed in range(seeds)]
            totals = ", ".join(str(sum(map(sum, run.values()))) for run in runs)
            shares = [
                f"{sum(sum(run[kind]) for run in runs)} of {sum(len(run[kind]) for run in runs)}"
                for kind in KINDS
            ]
            recorded = "losses and norms" if norms else "losses"
            print(f"| {name} | {recorded} | {totals} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
