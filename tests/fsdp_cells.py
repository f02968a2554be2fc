"""What ranks do in the tests of sharded models; child processes import it by name."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from microclip import Clipper

import processes
import properties
from measure import peak_memory


@dataclasses.dataclass(frozen=True)
class Cell:
    scope: str = "rank"
    b: int | None = None
    rule: str = "MinNorm()"
    reduction: str = "mean"
    nonfinite: str = "propagate"
    dtype: torch.dtype = torch.float32
    nested: bool = True
    reshard: bool = True
    half: bool = False  # parameters in bfloat16, reduced in float32
    tied: bool = False
    bad: int | None = None  # the rank that has an example with NaN
    folds: int = 1
    domains: bool = False


CELLS = {
    **{
        f"{scope} {'whole' if b is None else b} {rule}": Cell(scope, b, rule)
        for scope in ("rank", "world")
        for b in (None, 2)
        for rule in ("MinNorm()", "Mean(rescale=True)", "Median(rescale=False)")
        if not (scope == "world" and "False" in rule)
    },
    "rank in float64": Cell(b=2, dtype=torch.float64),
    "world in float64": Cell("world", 2, dtype=torch.float64),
    "rank, not nested": Cell(b=2, nested=False),
    "world, not nested": Cell("world", 2, nested=False),
    "rank, not resharded": Cell(b=2, reshard=False),
    "world, not resharded": Cell("world", 2, reshard=False),
    "rank in half": Cell(b=2, half=True),
    "world in half": Cell("world", 2, half=True),
    "rank, tied": Cell(b=2, tied=True),
    "world, tied": Cell("world", 2, tied=True),
    "rank, sum": Cell(b=2, reduction="sum"),
    "world, sum": Cell("world", 2, reduction="sum"),
    "rank, skip": Cell(b=2, nonfinite="skip", bad=1),
    "world, skip": Cell("world", 2, nonfinite="skip", bad=1),
    "rank, folds": Cell(b=2, folds=2),
    "world, folds": Cell("world", 2, folds=2),
    "rank, domains": Cell(b=2, domains=True),
}
SIZE = 6


class Tied(nn.Module):
    """The same weight twice."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.head = nn.Linear(5, 3)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh())


def network(cell: Cell) -> nn.Module:
    return Tied(cell.dtype) if cell.tied else processes.Net(cell.dtype)


def data(cell: Cell, rank: int) -> Any:
    x, y = processes.batch(rank, SIZE, cell.dtype)
    if rank == cell.bad:
        x[1] = torch.nan
    return x, y


def domains(cell: Cell) -> list[str] | None:
    return ["de", "en", "de", "en", "fr", "fr"] if cell.domains else None


def work(rank: int, world: int) -> dict[str, Any]:
    """Run all cells on one rank."""
    warnings.simplefilter("ignore")
    return {name: step(cell, rank, world) for name, cell in CELLS.items()}


def sharded(cell: Cell, world: int) -> nn.Module:
    net = network(cell)
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (world,)),
        "reshard_after_forward": cell.reshard,
    }
    if cell.half:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if cell.nested and not cell.tied:
        for child in (net.body, net.head):
            fully_shard(child, **options)
    return fully_shard(net, **options)


def whole(parameter: nn.Parameter) -> torch.Tensor | None:
    return None if parameter.grad is None else parameter.grad.full_tensor().clone()


def step(cell: Cell, rank: int, world: int) -> Any:
    model = sharded(cell, world)
    examples = data(cell, rank)
    clipper = Clipper(
        model, cell.b, rule=properties.RULES[cell.rule], reduction=cell.reduction,
        nonfinite=cell.nonfinite, scope=cell.scope,
    )  # fmt: skip
    for _ in range(2):
        model.zero_grad()
        if cell.folds == 1:
            outcome = clipper.backward(processes.losses(model), examples, domains=domains(cell))
        else:
            for rows in (slice(0, 4), slice(4, 6)):
                clipper.fold(processes.losses(model), (examples[0][rows], examples[1][rows]))
            outcome = clipper.finish()
    found = [whole(parameter) for parameter in model.parameters()]
    once = found
    clipper.backward(processes.losses(model), examples, domains=domains(cell))
    twice = [whole(parameter) for parameter in model.parameters()]
    return once, twice, outcome.norms


def memory(rank: int, world: int) -> tuple[int, int, int]:
    """Return the bytes of a gradient, and the peaks of a plain and of a clipped step."""

    def model() -> nn.Module:
        net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
        for child in net:
            fully_shard(child)
        return fully_shard(net)

    def peak(net: nn.Module, step: Any) -> int:
        peaks = []
        for _ in range(6):  # what waits for the other rank holds memory, so the least one counts
            net.zero_grad()
            dist.barrier()
            peaks.append(peak_memory(step))
        return min(peaks[1:])

    batch = torch.randn(2, 512)
    net = model()
    plain = peak(net, lambda net=net: net(batch).square().mean().backward())
    net = model()
    clipper = Clipper(net)
    clipped = peak(
        net, lambda net=net: clipper.backward(lambda x: net(x).square().mean((1,)), batch)
    )
    return 8 * 4 * (512 * 512 + 512), plain, clipped


def faults(rank: int, world: int) -> dict[str, str]:
    """Return what each rank hears of what goes wrong."""
    heard = {}
    cell = Cell()
    for scope in ("rank", "world"):
        model = sharded(cell, world)
        clipper = Clipper(model, 2, scope=scope)
        batch = processes.batch(rank, 6 + 2 * rank, torch.float32)
        try:
            clipper.backward(processes.losses(model), batch)
        except RuntimeError as error:
            heard[f"uneven {scope}"] = str(error)
        assert all(p.grad is None for p in model.parameters())
    model = sharded(cell, world)
    heard["fused"] = refusal(
        lambda: Clipper(model, 2, engine="fused").backward(
            processes.losses(model), processes.batch(rank, 6, torch.float32)
        )
    )
    heard["median"] = refusal(
        lambda: Clipper(
            model, 2, scope="world", rule=properties.RULES["Median(rescale=False)"]
        ).backward(processes.losses(model), processes.batch(rank, 6, torch.float32))
    )
    heard["plain"] = refusal(lambda: Clipper(nn.Linear(2, 2), scope="world"))
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
    heard["hsdp"] = refusal(lambda: Clipper(fully_shard(nn.Linear(4, 4), mesh=mesh)))
    half = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(half[0])
    heard["half"] = refusal(lambda: Clipper(half))
    divided = fully_shard(nn.Linear(4, 4))
    divided.set_gradient_divide_factor(3.0)
    heard["divided"] = refusal(lambda: Clipper(divided))
    parallel = parallelize_module(
        nn.Linear(4, 4), init_device_mesh("cpu", (world,)), ColwiseParallel()
    )
    heard["parallel"] = refusal(lambda: Clipper(parallel))
    return heard


def refusal(action: Any) -> str:
    try:
        action()
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return ""
