"""Draw the pictures of README and documentation: `python docs/images/make_images.py`.

What is drawn is computed, by the library or from `results/results.json`, and not sketched. Given
the page that `microclip demo` writes, a picture of its suspects is taken, too:

    microclip demo && python docs/images/make_images.py demo-output/index.html
"""

import json
import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import microclip

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "results" / "results.json"
# From the palette of Okabe and Ito, which people with any color vision can tell apart.
BLUE, ORANGE, GREEN, INK, FAINT = "#0072b2", "#d55e00", "#009e73", "#1f2328", "#c9d1d9"

plt.rcParams.update(
    {
        "font.size": 11,
        "text.color": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "microclip",  # the same picture, the same file
    }
)


def clipping() -> None:
    """Draw eight micro-batch gradients, one of them with a dragger, before and after."""
    angles = [74, 52, 66, 88, 45, 60, 80, -38]  # degrees
    norms = torch.tensor([1.5, 1.25, 1.9, 1.1, 1.6, 1.0, 1.35, 6.0])
    weights = microclip.rules.MinNorm().weights(norms, torch.full((8,), 4))
    directions = torch.tensor(
        [[math.cos(math.radians(a)), math.sin(math.radians(a))] for a in angles]
    )
    bound = norms.min().item()

    figure, (bars, plain, clipped) = plt.subplots(
        1, 3, figsize=(11, 3.8), width_ratios=[1.2, 1, 1], layout="constrained"
    )
    place = list(range(1, 9))
    colors = [BLUE] * 7 + [ORANGE]
    bars.bar(place, norms, color=FAINT, width=0.72)
    bars.bar(place, norms * weights, color=colors, width=0.72)
    bars.axhline(bound, color=INK, linestyle="--", linewidth=1)
    bars.annotate(
        "bound = smallest norm",
        (6, bound),
        (6.9, 2.75),
        ha="right",
        arrowprops={"arrowstyle": "-|>", "color": INK},
    )
    bars.text(7.45, 5.3, "a dragger: micro-batch 8\nholds a bad example", ha="right", color=ORANGE)
    bars.text(7.45, 4.4, "gray is cut off", ha="right", color="#57606a")
    bars.set(xticks=place, xlabel="micro-batch", ylabel="gradient norm")
    bars.set_title("Every gradient is rescaled\nto the smallest norm", fontsize=12)

    for axes, kept, title in (
        (plain, torch.ones(8), "Plain mean:\npulled toward the dragger"),
        (clipped, weights, "Clipped mean (magnified):\nback with the other seven"),
    ):
        gradients = directions * (norms * kept)[:, None]
        for (x, y), color in zip(gradients.tolist(), colors, strict=True):
            _arrow(axes, x, y, color, 1.4)
        x, y = gradients.mean(0).tolist()
        _arrow(axes, x, y, INK, 3.2)
        axes.set_aspect("equal")
        axes.axis("off")
        axes.set_title(title, fontsize=12)
    plain.set(xlim=(-1.1, 5.4), ylim=(-4.1, 2.1))
    plain.text(1.15, 0.12, "mean", fontweight="bold")
    plain.text(2.75, -1.75, "dragger", color=ORANGE)
    clipped.set(xlim=(-0.5, 1.5), ylim=(-0.8, 1.1))
    clipped.text(0.52, 0.3, "mean", fontweight="bold")
    clipped.text(0.62, -0.4, "dragger", color=ORANGE)
    _save(figure, "clipping.png")


def sweet_spot() -> None:
    """Draw what each micro-batch size gained over tuned plain training in the reproduction."""
    tasks = json.loads(RESULTS.read_text())["tasks"]
    drawn = (
        ("speech", "speech with canaries, WER", ORANGE, "o"),
        ("cifar10n", "CIFAR-10N, accuracy", BLUE, "s"),
        ("digits", "digits, 20 % wrong labels, accuracy", GREEN, "D"),
    )
    figure, axes = plt.subplots(figsize=(7.5, 3.9), layout="constrained")
    axes.axhline(0, color=INK, linewidth=1)
    for number, (name, label, color, mark) in enumerate(drawn):
        arms = [a for a in tasks[name]["arms"] if a["arm"] in {f"b{2**k}" for k in range(5)}]
        arms = sorted((a for a in arms if a["b"] < a["B"]), key=lambda arm: arm["b"])
        x = [arm["b"] * 1.09 ** (number - 1) for arm in arms]
        gains = [arm["gain"]["estimate"] for arm in arms]
        axes.errorbar(
            x,
            [g["mean"] for g in gains],
            [
                [g["mean"] - g["low"] for g in gains],
                [g["high"] - g["mean"] for g in gains],
            ],
            fmt=mark + "-",
            color=color,
            capsize=3,
            linewidth=1.4,
            label=label,
        )
    axes.set_xscale("log", base=2)
    axes.set(
        xticks=[1, 2, 4, 8, 16],
        xticklabels=["1", "2", "4", "8", "16"],
        xlabel="micro-batch size b, rule MinNorm",
        ylabel="points better than plain training",
    )
    axes.legend(frameon=False, loc="lower right")
    _save(figure, "sizes.svg")


def probe() -> None:
    """Draw what the probe finds where a fifth of the targets is far off, as on its page."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    model = torch.nn.Sequential(*layers)
    x = torch.randn(2048, 20)
    y = torch.where(torch.rand(2048) < 0.2, 20 * torch.randn(2048), 3 * x[:, 0])

    def loss_fn(batch):
        return (model(batch[0]).squeeze(1) - batch[1]).square()

    batches = list(zip(x.split(64), y.split(64), strict=True))
    with plt.rc_context(plt.rcParamsDefault):
        microclip.probe(model, loss_fn, batches).plot(HERE / "probe.png")
    print(HERE / "probe.png")


def report(demo: Path) -> None:
    """Photograph the top of the demo's page, with the system's Chromium."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        system = {"executable_path": "/usr/bin/chromium", "args": ["--no-sandbox"]}
        browser = playwright.chromium.launch(**system)
        # down to the first row of suspects, and the bar that counts verdicts
        page = browser.new_page(viewport={"width": 1000, "height": 1020}, device_scale_factor=1.5)
        page.goto(demo.resolve().as_uri())
        page.get_by_role("button", name="Relabel").first.wait_for()
        page.screenshot(path=HERE / "report.png")
        browser.close()
    picture = Image.open(HERE / "report.png").convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(HERE / "report.png", optimize=True)
    print(HERE / "report.png")


def _arrow(axes, x: float, y: float, color: str, width: float) -> None:
    axes.annotate(
        "",
        (x, y),
        (0, 0),
        arrowprops={
            "arrowstyle": "-|>",
            "color": color,
            "linewidth": width,
            "shrinkA": 0,
            "shrinkB": 0,
            "mutation_scale": 10 + 2.5 * width,
        },
        zorder=2 + width,
    )


def _save(figure, name: str) -> None:
    stamp = {"Date": None} if name.endswith("svg") else {"Software": None}
    figure.savefig(HERE / name, facecolor="white", dpi=150, metadata=stamp)
    plt.close(figure)
    print(HERE / name)


if __name__ == "__main__":
    clipping()
    sweet_spot()
    probe()
    if sys.argv[1:]:
        report(Path(sys.argv[1]))
