"""What ranks do in the tests of sharded models; child processes import it by name."""

from __future__ import annotations

import contextlib
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
    evaluated: str = ""  # when the model runs without a backward pass


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
    **{
        f"{scope}, evaluated {when}, {how}": Cell(
            scope,
            2,
            nested=how != "not nested",
            reshard=how != "not resharded",
            folds=2 if "folds" in when else 1,
            evaluated=when,
        )
        for scope in ("rank", "world")
        for how in ("nested", "not nested", "not resharded")
        for when in (
            "before the clipper",
            "before steps",
            "between folds",
            "with gradients before folds",
            "by hand",
            "inside the loss",
            "and left whole",
        )
    },
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


def work(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    """Run these cells on one rank."""
    warnings.simplefilter("ignore")
    cells = {name: CELLS[name] for name in names if concerns(CELLS[name], world)}
    return {name: step(cell, rank, world) for name, cell in cells.items()}


def concerns(cell: Cell, world: int) -> bool:
    """Whether a cell says anything new about so many ranks."""
    return world <= 2 if cell.evaluated else cell.bad is None or cell.bad < world


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
    parameters = list(model.parameters())  # as an optimizer has them
    x, y = examples = data(cell, rank)
    losses = processes.losses(model)

    def evaluate(when: str) -> None:
        if when not in cell.evaluated:
            return
        if when == "by hand":
            model.unshard()
            return
        with torch.set_grad_enabled("with gradients" in cell.evaluated):
            model.eval()
            model(x)
            model.train()

    def evaluating_losses(batch: Any) -> torch.Tensor:
        evaluate("inside the loss")
        each = losses(batch)
        evaluate("inside the loss")
        return each

    if cell.evaluated == "and left whole":
        model.set_reshard_after_backward(False)
    evaluate("before the clipper")
    clipper = Clipper(
        model, cell.b, rule=properties.RULES[cell.rule], reduction=cell.reduction,
        nonfinite=cell.nonfinite, scope=cell.scope,
    )  # fmt: skip

    def clip() -> Any:
        evaluate("before steps")
        evaluate("by hand")
        if cell.folds == 1:
            return clipper.backward(evaluating_losses, examples, domains=domains(cell))
        for rows in (slice(0, 4), slice(4, 6)):
            evaluate("folds")
            clipper.fold(losses, (x[rows], y[rows]))
        evaluate("folds")
        return clipper.finish()

    for _ in range(2):
        for parameter in parameters:
            parameter.grad = None
        outcome = clip()
    once = [whole(parameter) for parameter in parameters]
    clip()
    twice = [whole(parameter) for parameter in parameters]
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
    heard.update(misuse(rank, world))
    return heard


def misuse(rank: int, world: int) -> dict[str, str]:
    """Return what is said about models that are not as the Clipper found them."""
    heard = {}
    examples = processes.batch(rank, 6, torch.float32)

    def evaluated(model: Any) -> Any:
        with torch.no_grad():
            model(examples[0])
        return model

    net = network(Cell())
    clipper = Clipper(net, 2)
    model = fully_shard(net)
    heard["made before"] = refusal(lambda: clipper.backward(processes.losses(model), examples))
    evaluated(model)
    heard["made before, evaluated"] = refusal(
        lambda: clipper.backward(processes.losses(model), examples)
    )
    half = network(Cell())
    fully_shard(half.body)
    heard["half, evaluated"] = refusal(lambda: Clipper(evaluated(half)))
    frozen = evaluated(fully_shard(network(Cell())))
    frozen.head.requires_grad_(False)
    heard["frozen, evaluated"] = refusal(lambda: Clipper(frozen))
    for scope in ("rank", "world"):
        model = sharded(Cell(), world)
        clipper = Clipper(model, scope=scope)
        processes.losses(model)(examples).mean().backward()
        heard[f"own backward {scope}"] = refusal(lambda clipper=clipper: clipper.fold(size=6))
        model = sharded(Cell(), world)
        clipper = Clipper(model, scope=scope)
        handle = model.body.register_forward_hook(lambda *_: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            clipper.backward(processes.losses(model), examples)
        handle.remove()
        again = lambda: clipper.backward(processes.losses(model), examples)  # noqa: B023, E731
        heard[f"broken off {scope}"] = refusal(again)
    return heard


def refusal(action: Any) -> str:
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


class Branches(nn.Module):
    """Layers of the same size, of which each rank uses some."""

    def __init__(self, used: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.head, self.used = nn.Linear(5, 3), used
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x).tanh()
        for name in self.used:
            hidden = hidden + getattr(self, name)(hidden)
        return self.head(hidden)


BRANCHES = {  # the layers that each rank uses in the first two steps and then; nested, filled up
    "one": (("a", ""), ("a", ""), False, False),
    "one, nested": (("a", ""), ("a", ""), True, False),
    "another": (("a", "b"), ("a", "b"), False, False),
    "another, nested": (("a", "b"), ("a", "b"), True, False),
    "another order, nested": (("ab", "ba"), ("ab", "ba"), True, False),
    "another, later": (("a", "a"), ("a", "b"), False, False),
    "another, later, nested": (("a", "a"), ("a", "b"), True, False),
    "one, filled up": (("a", ""), ("a", ""), False, True),
    "another, filled up": (("a", "b"), ("a", "b"), False, True),
    "the same": (("a", "a"), ("b", "b"), True, False),
}


def branches(rank: int, world: int) -> dict[str, Any]:
    """Let ranks use different layers: what comes of it, and whether `.grad` was touched."""
    found = {}
    for name, (first, later, nested, filled) in BRANCHES.items():
        for scope in ("rank", "world"):
            net = Branches(first[rank])
            for child in (net.body, net.a, net.b, net.head) if nested else ():
                fully_shard(child)
            fully_shard(net)
            if filled:
                net.set_reduce_scatter_unused_params(True)
            clipper = Clipper(net, 3, scope=scope)
            examples = processes.batch(rank, 6, torch.float64)
            message = ""
            try:
                for used in (first, first, later):
                    net.zero_grad()
                    net.used = used[rank]
                    clipper.backward(processes.losses(net), examples)
            except RuntimeError as error:
                message = f"{type(error).__name__}: {error}"
                assert all(parameter.grad is None for parameter in net.parameters())
            found[f"{name}, {scope}"] = message, message or [whole(p) for p in net.parameters()]
            dist.barrier()
    return found


def disagreements(rank: int, world: int) -> dict[str, str]:
    """Return what each rank hears where they differ, or one has nothing."""
    heard = {}
    cell = Cell()
    for scope in ("rank", "world"):
        for what in ("size", "rule", "frozen", "nothing", "fewer folds"):
            model = sharded(cell, world)
            if what == "frozen" and rank == 1:
                model.head.bias.requires_grad_(False)
            size = 3 if what == "size" and rank == 1 else 2
            rule = properties.RULES["Unit()" if what == "rule" and rank == 1 else "MinNorm()"]
            clipper = Clipper(model, size, rule=rule, scope=scope)
            x, y = processes.batch(rank, 6, torch.float32)
            empty = what == "nothing" and rank == 1
            try:
                if what == "fewer folds":
                    clipper.fold(processes.losses(model), (x, y))
                    if rank == 0:
                        clipper.fold(processes.losses(model), (x, y))
                    clipper.finish()
                else:
                    rows = slice(0, 0 if empty else 6)
                    clipper.backward(processes.losses(model), (x[rows], y[rows]))
            except (RuntimeError, ValueError) as error:
                heard[f"{what} {scope}"] = f"{type(error).__name__}: {error}"
            dist.barrier()
    return heard


def mistakes(rank: int, world: int) -> dict[str, Any]:
    """Return all that goes wrong; starting ranks takes longer than all of it."""
    return {f.__name__: f(rank, world) for f in (faults, branches, disagreements)}
