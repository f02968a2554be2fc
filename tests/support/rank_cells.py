"""What two ranks do in the tests of mistakes with ranks; child processes import it by name.

A cell is a function of the rank. It returns what it found, or raises, and the test looks at both.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.utils.checkpoint import checkpoint

from microclip import Clipper, rules
from microclip.distributed import RankClip

WORLD = 2
CELLS: dict[str, Callable[[int], Any]] = {}


class Net(nn.Module):
    """Small enough to be quick, with something in the middle that may be wrapped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def batch(rank: int, size: int = 6, turn: int = 0) -> Any:
    generator = torch.Generator().manual_seed(100 + rank + 10 * turn)
    x = torch.randn(size, 4, generator=generator, dtype=torch.float64) * (1 + rank)
    return x, torch.randint(0, 3, (size,), generator=generator)


def losses(model: Any) -> Callable[[Any], torch.Tensor]:
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def grads(net: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def cell(function: Callable[..., Any]) -> Callable[..., Any]:
    CELLS[function.__name__] = function
    return function


def cases(*values: Any) -> Callable[..., Any]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for value in values:
            name = f"{function.__name__} {value}"
            CELLS[name] = lambda rank, value=value: function(rank, value)
        return function

    return register


def work(rank: int, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result, error = CELLS[name](rank), ""
            except (Exception, AssertionError) as failure:
                result, error = None, f"{type(failure).__name__}: {failure}"
        heard = [str(w.message) for w in caught if w.category is RuntimeWarning]
        found[name] = result, error, heard
        if dist.is_initialized():
            dist.barrier()
    return found


# wrappers that are not the whole model


class Halves(nn.Module):
    def __init__(self, net: Net, body: Any, head: Any) -> None:
        super().__init__()
        self.body, self.head = body(net.body), head(net.head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


@cases("stream", "two_pass", "fused", "auto")
def beside_a_wrapper(rank: int, engine: str) -> Any:
    net = Net()
    both = nn.ModuleList([Ddp(net.body), net.head])
    clipper = Clipper(both, 2, engine=engine)
    for _ in range(2):
        net.zero_grad()
        clipper.backward(losses(lambda x: both[1](torch.tanh(both[0](x)))), batch(rank))
    return grads(net)


@cases("body", "head", "both")
def wrapped_inside(rank: int, which: str) -> Any:
    net = Net()
    plain: Any = lambda module: module  # noqa: E731
    model = Halves(net, plain if which == "head" else Ddp, plain if which == "body" else Ddp)
    Clipper(model, 2).backward(losses(model), batch(rank))
    return grads(net)


@cell
def beside_a_wrapper_own_backward(rank: int) -> Any:
    net = Net()
    both = nn.ModuleDict({"body": Ddp(net.body), "head": net.head})
    clipper = Clipper(both, engine="stream")
    for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
        with both["body"].no_sync():
            x, y = batch(rank)
            loss = losses(lambda x: both["head"](torch.tanh(both["body"](x))))((x[rows], y[rows]))
            loss.mean().backward()
            clipper.fold(size=2)
    clipper.finish()
    return grads(net)


@cases("group", "in another", "twice", "twice, evaluated", "checkpointed", "compiled")
def wrapped(rank: int, how: str) -> Any:
    net = Net()
    names = list(net.parameters())
    if how == "checkpointed":
        net.body = Checkpointed(net.body)
    inner = torch.compile(net, fullgraph=True, backend="eager") if how == "compiled" else net
    model = Ddp(inner, process_group=dist.new_group([0, 1]) if how == "group" else None)
    if how == "in another":
        model = Ddp(model)
    elif how.startswith("twice"):
        other = Ddp(net)
        if "evaluated" in how:
            other(batch(rank)[0])
    clipper = Clipper(model, 2)
    for _ in range(2):
        net.zero_grad()
        clipper.backward(losses(model), batch(rank))
    return [parameter.grad for parameter in names]


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@cell
def wrapped_twice_and_the_other_called(rank: int) -> Any:
    net = Net()
    model, other = Ddp(net), Ddp(net)
    Clipper(model, 2).backward(losses(other), batch(rank))


@cell
def wrappers_for_different_ranks(rank: int) -> Any:
    net = Net()
    alone = [dist.new_group([r]) for r in range(WORLD)][rank]
    Clipper(nn.ModuleList([Ddp(net.body), Ddp(net.head, process_group=alone)]))


@cases("stream", "two_pass", "fused", "auto")
def inside_of_the_wrapper(rank: int, engine: str) -> Any:
    net = Net()
    model = Ddp(net)
    net.body.weight.grad = torch.ones_like(net.body.weight)
    try:
        Clipper(net, 2, engine=engine).backward(losses(model), batch(rank))
    finally:
        assert bool((net.body.weight.grad == 1).all())
        assert net.head.weight.grad is None


@cases("list", "part", "later", "chunks")
def inside_of_the_wrapper_variant(rank: int, which: str) -> Any:
    net = Net()
    if which == "later":
        clipper = Clipper(net, 2)
    model = Ddp(net)
    if which == "list":
        clipper = Clipper(nn.ModuleList([net, nn.Linear(1, 1)]), 2)
    elif which == "part":
        clipper = Clipper(net.head, 2)
    elif which == "chunks":
        clipper = Clipper(net, 2)
        clipper.fold(losses(model), batch(rank))
        return
    clipper.backward(losses(model), batch(rank))


@cell
def inside_of_the_wrapper_own_backward(rank: int) -> Any:
    net = Net()
    model = Ddp(net)
    clipper = Clipper(net, engine="stream")
    losses(model)(batch(rank)).mean().backward()
    clipper.fold()


@cell
def inside_of_the_wrapper_and_set_right(rank: int) -> Any:
    """After an error, who does it right is not told off again."""
    net = Net()
    model = Ddp(net)
    for attempt in (losses(model), None):
        clipper = Clipper(net, 2, engine="stream")
        with contextlib.suppress(RuntimeError):
            if attempt is None:
                losses(model)(batch(rank)).mean().backward()
                clipper.fold()
            else:
                clipper.backward(attempt, batch(rank))
    net.zero_grad()
    with model.no_sync():
        losses(model)(batch(rank)).mean().backward()
        clipper.fold(size=6)
    clipper.finish()
    net.zero_grad()
    Clipper(model, 2).backward(losses(model), batch(rank))
    return grads(net)


@cell
def inside_of_the_wrapper_but_local(rank: int) -> Any:
    """Each rank alone, and averaged by hand: allowed, with a warning."""
    net = Net()
    model = Ddp(net)
    clipper = Clipper(net, 2, engine="stream")
    for _ in range(2):
        net.zero_grad()
        with model.no_sync():
            clipper.backward(losses(model), batch(rank))
    return grads(net)


@cell
def no_wrapper(rank: int) -> Any:
    net = Net()
    clipper = Clipper(net, 2)
    for _ in range(2):
        net.zero_grad()
        clipper.backward(losses(net), batch(rank))
    return grads(net)


@cell
def copies_and_pickles_of_a_watched_model(rank: int) -> Any:
    net = Net()
    model = Ddp(net)
    clipper = Clipper(model, 2)
    lone = Net()
    Clipper(lone, 2)
    copy.deepcopy(lone)(batch(0)[0])
    import pickle

    assert pickle.loads(pickle.dumps(lone))(batch(0)[0]).shape == (6, 3)
    clipper.backward(losses(model), batch(rank))
    return grads(net)


@cell
def fully_sharded_of_old(rank: int) -> Any:
    Clipper(FullyShardedDataParallel(Net(), device_id=torch.device("cpu")))


@cases("trained", "teacher", "frozen", "inside")
def stranger(rank: int, which: str) -> Any:
    """loss_fn calls another wrapper as well."""
    net = Net()
    model, other = Ddp(net), Ddp(Net())
    if which == "frozen":
        other.requires_grad_(False)

    def loss_fn(batch: Any) -> torch.Tensor:
        with torch.no_grad() if which == "teacher" else contextlib.nullcontext():
            told = other(batch[0]) * 0.0
        return losses(lambda x: model(x) + told)(batch)

    clipper = Clipper(nn.ModuleList([model, other]) if which == "inside" else model, 2)
    for _ in range(2):
        net.zero_grad()
        clipper.backward(loss_fn, batch(rank))
    return grads(net)


# gradients that were averaged, or are about to be


@cases("fold", "evaluation", "backward", "loss", "local")
def averaged_before_fold(rank: int, which: str) -> Any:
    """A synchronised backward pass, and only fold() in no_sync."""
    net = Net()
    model = Ddp(net)
    clipper = Clipper(model, engine="stream")
    loss = losses(model)(batch(rank)).mean()
    if which != "backward":
        loss.backward()
    if which == "evaluation":
        with torch.no_grad():
            model(batch(rank)[0])
    with clipper.local() if which == "local" else model.no_sync():
        if which == "backward":
            loss.backward()
        clipper.fold(loss=loss if which == "loss" else None)


@cases("stream", "two_pass", "fused", "auto", "own", "own module")
def evaluated_with_gradients(rank: int, engine: str) -> Any:
    """A forward pass without a backward pass leaves the wrapper waiting to average."""
    net = Net()
    model = Ddp(net)
    own = engine.startswith("own")
    clipper = Clipper(model, 6 if own else 2, engine="stream" if own else engine)
    model(batch(rank, turn=1)[0])
    if own:
        with model.no_sync():
            losses(net if engine == "own module" else model)(batch(rank)).mean().backward()
            clipper.fold()
        clipper.finish()
    else:
        clipper.backward(losses(model), batch(rank))
    return grads(net)


@cell
def evaluated_with_gradients_between_chunks(rank: int) -> Any:
    net = Net()
    model = Ddp(net)
    clipper = Clipper(model, 2)
    x, y = batch(rank)
    clipper.fold(losses(model), (x[:4], y[:4]))
    model(x)
    clipper.fold(losses(model), (x[4:], y[4:]))
    clipper.finish()
    return grads(net)


@cases("", "static_graph", "gradient_as_bucket_view", "find_unused_parameters")
def plain_and_clipped_steps(rank: int, option: str) -> Any:
    """Both kinds of steps in turn; the second rank has nothing in one of the clipped ones."""
    net = Net()
    model = Ddp(net, bucket_cap_mb=1, **({option: True} if option else {}))
    found = []
    clipper = None
    for turn in range(4):
        for clipped in (False, True):
            net.zero_grad()
            if clipped:
                clipper = clipper or Clipper(model, 2)
                size = 0 if turn == 1 and rank == 1 else 6
                clipper.backward(losses(model), batch(rank, size))
            else:
                losses(model)(batch(rank)).mean().backward()
            found.append(grads(net))
    return found


# communication hooks


@cases("before", "after", "power", "builtin", "builtin after", "rank clip", "rank clip after")
def hooked(rank: int, when: str) -> Any:
    net = Net()
    model = Ddp(net)
    hook: Any = lambda: model.register_comm_hook(None, fp16_compress_hook)  # noqa: E731
    if when == "power":
        state = PowerSGDState(process_group=None, matrix_approximation_rank=1)
        hook = lambda: model.register_comm_hook(state, powerSGD_hook)  # noqa: E731
    elif when.startswith("builtin"):
        hook = lambda: model._register_builtin_comm_hook(  # noqa: E731
            dist.BuiltinCommHookType.FP16_COMPRESS
        )
    elif when.startswith("rank clip"):
        hook = lambda: RankClip(model)  # noqa: E731
    if "after" not in when:
        hook()
    clipper = Clipper(model, 2)
    if when == "after":
        clipper.backward(losses(model), batch(rank))
        net.zero_grad()
    hook()
    try:
        clipper.backward(losses(model), batch(rank))
    finally:
        assert grads(net) == [None] * 4


@cell
def ignored_parameter(rank: int) -> Any:
    net = Net()
    Ddp._set_params_and_buffers_to_ignore_for_model(net, ["head.weight"])
    Clipper(Ddp(net))


@cell
def ignored_and_frozen(rank: int) -> Any:
    net = Net()
    net.head.requires_grad_(False)
    Ddp._set_params_and_buffers_to_ignore_for_model(net, ["head.weight", "head.bias"])
    model = Ddp(net)
    Clipper(model, 2).backward(losses(model), batch(rank))
    return grads(net)[:2]


@cell
def joined(rank: int) -> Any:
    net = Net()
    model = Ddp(net)
    clipper = Clipper(model, 2)
    with model.join():
        clipper.backward(losses(model), batch(rank))


@cell
def delayed(rank: int) -> Any:
    net = Net()
    named = [(n, p) for n, p in net.named_parameters() if n.startswith("body")]
    Clipper(Ddp(net, delay_all_reduce_named_params=named, param_to_hook_all_reduce=net.head.weight))


# ranks that differ


class Own(rules.Rule):
    """Without a repr of its own."""

    def __init__(self, power: float = 1.0) -> None:
        self.power = power

    def weights(self, norms: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return (norms.nan_to_num(1.0).min() / norms) ** self.power


class Remembers(Own):
    def state_dict(self) -> dict[str, Any]:
        return {"power": self.power}


OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "size": lambda rank: {"microbatch_size": 2 + rank},
    "size or none": lambda rank: {"microbatch_size": (2, None)[rank]},
    "rule": lambda rank: {"rule": (rules.MinNorm(), rules.Unit())[rank]},
    "rule's number": lambda rank: {"rule": rules.Fixed(1.0 + rank)},
    "own rule": lambda rank: {"rule": Own(1.0 + rank)},
    "state": lambda rank: {"rule": Remembers(1.0 + rank)},
    "reduction": lambda rank: {"reduction": ("mean", "sum")[rank]},
    "nonfinite": lambda rank: {"nonfinite": ("skip", "propagate")[rank]},
    "scale": lambda rank: {"grad_scaler": torch.amp.GradScaler("cpu", init_scale=2.0**rank)},
    "scaler": lambda rank: {"grad_scaler": (torch.amp.GradScaler("cpu"), None)[rank]},
}


@cases(*OPTIONS)
def differs(rank: int, what: str) -> Any:
    net = Net()
    model = Ddp(net)
    net.body.weight.grad = torch.ones_like(net.body.weight)
    clipper = Clipper(model, **{"microbatch_size": 2, **OPTIONS[what](rank)})
    try:
        clipper.backward(losses(model), batch(rank))
    finally:
        assert bool((net.body.weight.grad == 1).all())
        assert net.head.weight.grad is None


@cases("frozen", "frozen later", "another one frozen", "values", "head", "dtype", "new", "idle")
def parameters_differ(rank: int, what: str) -> Any:
    net = Net()
    model: Any = Ddp(net)
    if rank == 1:
        if what in ("frozen", "idle"):
            net.head.bias.requires_grad_(False)
        elif what == "values":
            with torch.no_grad():
                net.body.bias[0] += 1e-9
        elif what == "new":
            net.more = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    if what == "another one frozen":
        (net.head.bias if rank else net.body.bias).requires_grad_(False)
    if what in ("head", "dtype"):
        head = nn.Linear(5, 3).double()  # not made equal on the ranks
        torch.manual_seed(rank if what == "head" else 0)
        nn.init.normal_(head.weight)
        nn.init.zeros_(head.bias)
        head.to(torch.float32 if rank and what == "dtype" else torch.float64)
        model = Halves(net, Ddp, lambda _: head)
    clipper = Clipper(model, 2)
    if what == "frozen later":
        clipper.backward(losses(model), batch(rank))
        net.head.bias.requires_grad_(rank == 0)
    loss_fn = losses(model)
    if what == "dtype":
        loss_fn = losses(lambda x: head(torch.tanh(model.body(x)).to(head.weight.dtype)).double())
    clipper.backward(loss_fn, batch(rank, 0 if what == "idle" and rank == 1 else 6))


@cases("rule without repr", "unfrozen on all", "looked at later")
def does_not_differ(rank: int, what: str) -> Any:
    net = Net()
    model = Ddp(net)
    if what == "looked at later":  # another object on one rank, of the same value
        clipper = Clipper(model, 2)
        clipper.backward(losses(model), batch(rank))
        with torch.no_grad():
            net.head.bias.copy_(Net().head.bias)
            net.body.weight += 1.0
            net.body.weight -= 1.0
            net.body.weight.copy_(Net().body.weight)
        if rank == 1:
            net.head.bias = nn.Parameter(net.head.bias.detach().clone())
        net.zero_grad()
        clipper.backward(losses(model), batch(rank))
        return grads(net)
    if what == "rule without repr":
        Clipper(model, 2, rule=Own()).backward(losses(model), batch(rank))
        return grads(net)
    net.head.requires_grad_(False)
    clipper = Clipper(model, 2)
    clipper.backward(losses(model), batch(rank))
    net.head.requires_grad_(True)
    net.zero_grad()
    clipper.backward(losses(model), batch(rank))
    return grads(net)


LABELS: dict[str, tuple[list[Any], list[Any]]] = {
    "int and numpy": ([1, 2] * 3, list(numpy.array([1, 2] * 3))),
    "int and bool": ([0, 1] * 3, [False, True] * 3),
    "int and float": ([1, 2] * 3, [1.0, 2.0] * 3),
    "str and numpy": (["a", "b"] * 3, list(numpy.array(["a", "b"] * 3))),
    "int and tensor": ([1, 2] * 3, torch.tensor([1, 2] * 3)),  # type: ignore[dict-item]
    "tuples": ([(1, "a"), (2, "a")] * 3, [(numpy.int32(1), "a"), (2.0, numpy.str_("a"))] * 3),
}


@cases(*LABELS)
def labels(rank: int, what: str) -> Any:
    net = Net()
    model = Ddp(net)
    Clipper(model, 2).backward(losses(model), batch(rank), domains=LABELS[what][rank])
    return grads(net)


# losses that communicate


def normalised(model: Any) -> Callable[[Any], torch.Tensor]:
    """Each micro-batch's losses, divided by a number that all ranks have a say in."""

    def loss_fn(batch: Any) -> torch.Tensor:
        counted = (batch[1] == 0).sum().double() + 1
        dist.all_reduce(counted)
        return losses(model)(batch).sum() / counted

    return loss_fn


def logged(model: Any) -> Callable[[Any], torch.Tensor]:
    """Losses per example, with something that is only told to the others."""

    def loss_fn(batch: Any) -> torch.Tensor:
        found = losses(model)(batch)
        told = found.detach().mean()
        dist.all_reduce(told)
        dist.barrier()
        return found

    return loss_fn


def gathered(model: Any) -> Callable[[Any], torch.Tensor]:
    """Losses per example that look at the outputs of the other ranks."""

    def loss_fn(batch: Any) -> torch.Tensor:
        output = model(batch[0])
        parts = [torch.empty_like(output) for _ in range(WORLD)]
        dist.all_gather(parts, output.detach())
        everybody = torch.cat(parts)
        return torch.logsumexp(output @ everybody.T, 1) - output.gather(1, batch[1][:, None])[:, 0]

    return loss_fn


COMMUNICATES = {"normalised": normalised, "logged": logged, "gathered": gathered}
ENGINES = ("auto", "stream", "two_pass")


@cases(*[f"{kind} {engine}" for kind in COMMUNICATES for engine in ENGINES])
def communicates(rank: int, what: str) -> Any:
    kind, engine = what.split()
    net = Net()
    model = Ddp(net)
    clipper = Clipper(model, 2, engine=engine)
    for _ in range(3):
        net.zero_grad()
        clipper.backward(COMMUNICATES[kind](model), batch(rank))
    return grads(net)


@cases("uneven", "idle", "idle first", "finish", "fused", "skip", "chunks uneven", "one rank")
def communicates_and_cannot(rank: int, what: str) -> Any:
    net = Net()
    model = Ddp(net)
    options: dict[str, Any] = {}
    if what == "fused":
        options = {"engine": "fused"}
    elif what == "skip":
        options = {"engine": "two_pass", "nonfinite": "skip"}
    clipper = Clipper(model, 2, **options)
    loss_fn = (logged if what == "fused" else normalised)(model)
    if what == "one rank" and rank == 1:
        loss_fn = losses(model)
    if what == "chunks uneven":
        clipper.fold(loss_fn, batch(rank))
        if rank == 0:
            clipper.fold(loss_fn, batch(rank))
        clipper.finish()
        return
    if what == "finish" and rank == 1:
        clipper.finish()
        return
    sizes = {"uneven": (6, 3), "idle": (6, 0), "idle first": (0, 6)}
    clipper.backward(loss_fn, batch(rank, sizes.get(what, (6, 6))[rank]))


@cell
def communicates_later(rank: int) -> Any:
    """A single pass is chosen for a plain loss; the next one communicates."""
    net = Net()
    model = Ddp(net)
    clipper = Clipper(model, 2)
    for _ in range(2):
        clipper.backward(losses(model), batch(rank))
    net.zero_grad()
    clipper.backward(gathered(model), batch(rank))
    return grads(net)


@cell
def communicates_in_a_branch(rank: int) -> Any:
    """One function, which communicates from its third call on; a single pass stops before it."""
    net = Net()
    model = Ddp(net)
    clipper = Clipper(model, 2, verify="never")
    switch = SimpleNamespace(on=False)

    def loss_fn(batch: Any) -> torch.Tensor:
        return (gathered if switch.on else losses)(model)(batch)

    for _ in range(2):
        clipper.backward(loss_fn, batch(rank))
        net.zero_grad()
    switch.on = True
    clipper.backward(loss_fn, batch(rank))
    return grads(net)


@cell
def communicates_in_chunks(rank: int) -> Any:
    net = Net()
    model = Ddp(net)
    clipper = Clipper(model, 2)
    x, y = batch(rank)
    clipper.fold(normalised(model), (x[:4], y[:4]))
    clipper.fold(normalised(model), (x[4:], y[4:]))
    clipper.finish()
    return grads(net)


@cases("auto", "stream")
def communicates_alone(rank: int, engine: str) -> Any:
    """The model is not wrapped, and the loss is over all ranks."""
    net = Net()
    clipper = Clipper(net, 2, engine=engine)
    for _ in range(2):
        net.zero_grad()
        clipper.backward(normalised(net), batch(rank))
    return grads(net)


@cell
def communicates_and_draws(rank: int) -> Any:
    """The call that is broken off leaves no trace in generators and buffers."""
    found = []
    for engine in ("auto", "stream"):
        torch.manual_seed(rank)
        net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3))
        net.double()
        net.load_state_dict(nn.Sequential(
            Net().body, nn.BatchNorm1d(5), nn.Dropout(), Net().head).state_dict())  # fmt: skip
        model = Ddp(net)
        torch.manual_seed(rank)
        Clipper(model, 2, engine=engine).backward(normalised(model), batch(rank))
        found.append([*grads(net), *(b.clone() for b in net.buffers()), torch.get_rng_state()])
    return found


@cases("partial", "object", "module", "twice")
def communicates_by(rank: int, what: str) -> Any:
    """Loss functions that are no plain functions; the first of their kind may not communicate."""
    net = Net()
    model = Ddp(net)
    clipper = Clipper(model, 2)
    loss_fn: Any = normalised(model)
    if what == "partial":
        clipper.backward(functools.partial(losses(model)), batch(rank))
        loss_fn = functools.partial(loss_fn)
    elif what == "object":
        loss_fn = AsObject(loss_fn)
    elif what == "module":
        loss_fn = AsModule(loss_fn)
    else:
        for _ in range(2):
            clipper.backward(loss_fn, batch(rank))
    net.zero_grad()
    clipper.backward(loss_fn, batch(rank))
    return grads(net)


class AsObject:
    def __init__(self, loss_fn: Any) -> None:
        self.loss_fn = loss_fn

    def __call__(self, batch: Any) -> torch.Tensor:
        return self.loss_fn(batch)


class AsModule(nn.Module):
    def __init__(self, loss_fn: Any) -> None:
        super().__init__()
        self.loss_fn = loss_fn

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss_fn(batch)


class NameOnly:
    """A label that says where it is, and nothing else."""

    def __lt__(self, other: Any) -> bool:
        return id(self) < id(other)


@cell
def label_without_a_name(rank: int) -> Any:
    model = Ddp(Net())
    label = NameOnly()
    Clipper(model, 2).backward(losses(model), batch(rank), domains=[label] * 6)


@cell
def domains_on_one_rank(rank: int) -> Any:
    """Examples without a label are a domain of their own, as on one process."""
    net = Net()
    model = Ddp(net)
    Clipper(model, 2).backward(losses(model), batch(rank), domains=None if rank else ["a"] * 6)
    return grads(net)


# faults on one rank


@cell
def a_rank_fails_and_goes_on(rank: int) -> Any:
    """What it does next is its part of the step that the others are in."""
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    model = Ddp(net)
    clipper = Clipper(model, 2)

    def fails(batch: Any) -> torch.Tensor:
        raise MemoryError

    for turn in range(2):
        if rank == 1 and turn == 1:
            with contextlib.suppress(MemoryError):
                clipper.backward(fails, batch(rank))
        net.zero_grad()
        clipper.backward(losses(model), batch(rank))
    return grads(net)


@cases("propagate", "skip")
def scaled(rank: int, nonfinite: str) -> Any:
    """float16 loss scaling: an overflow on one rank is one on all."""
    net = Net()
    model = Ddp(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    clipper = Clipper(model, 2, grad_scaler=scaler, nonfinite=nonfinite)
    scales = []
    for turn in range(3):
        optimizer.zero_grad()
        x, y = batch(rank)
        if turn == 1 and rank == 1:
            x[0] = torch.inf
        clipper.backward(losses(model), (x, y))
        scaler.unscale_(optimizer)
        found = grads(net)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return found, scales


# RankClip


@cases("", "gradient_as_bucket_view", "static_graph")
def rank_clip(rank: int, option: str) -> Any:
    net = Net()
    model = Ddp(net, bucket_cap_mb=1, **({option: True} if option else {}))
    RankClip(model)
    for _ in range(3):
        net.zero_grad()
        losses(model)(batch(rank, 6)).mean().backward()
    return grads(net)


@cases("one rank", "all ranks")
def rank_clip_zero(rank: int, which: str) -> Any:
    net = Net()
    model = Ddp(net)
    clip = RankClip(model)
    scale = 0.0 if rank == 1 or which == "all ranks" else 1.0
    (losses(model)(batch(rank)).mean() * scale).backward()
    return grads(net), clip.outcome.weights.tolist()


@cell
def rank_clip_twice(rank: int) -> Any:
    model = Ddp(Net())
    RankClip(model)
    RankClip(model)


@cell
def rank_clip_and_another(rank: int) -> Any:
    model = Ddp(Net())
    model.register_comm_hook(None, fp16_compress_hook)
    RankClip(model)


@cell
def rank_clip_scaled(rank: int) -> Any:
    """A fixed bound is one of the loss that was not scaled."""
    net = Net()
    model = Ddp(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    RankClip(model, rules.Fixed(0.1), grad_scaler=scaler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    scaler.scale(losses(model)(batch(rank)).mean()).backward()
    scaler.unscale_(optimizer)
    return grads(net)


@cell
def rank_clip_plain(rank: int) -> Any:
    RankClip(Net())


@cell
def rank_clip_raise(rank: int) -> Any:
    net = Net()
    model = Ddp(net)
    clip = RankClip(model, nonfinite="raise")
    x, y = batch(rank)
    if rank == 1:
        x[0] = torch.nan
    try:
        losses(model)((x, y)).mean().backward()
    except Exception as error:
        heard = f"{type(error).__name__}: {error}"
    net.zero_grad()
    losses(model)(batch(rank)).mean().backward()  # the next step is a step
    return heard, grads(net), clip.step


@cell
def rank_clip_differs(rank: int) -> Any:
    net = Net()
    model = Ddp(net)
    RankClip(model, (rules.MinNorm(), rules.Unit())[rank])
    losses(model)(batch(rank)).mean().backward()


@cell
def rank_clip_accumulates(rank: int) -> Any:
    net = Net()
    model = Ddp(net)
    RankClip(model)
    x, y = batch(rank)
    with model.no_sync():
        (losses(model)((x[:4], y[:4])).sum() / 6).backward()
    (losses(model)((x[4:], y[4:])).sum() / 6).backward()
    return grads(net)


@cases("", "gradient_as_bucket_view", "static_graph", "no_sync", "scaled down")
def rank_clip_left_over(rank: int, how: str) -> Any:
    """The result of one step is in `.grad` when the next one begins; then the loop is mended."""
    net = Net()
    model = Ddp(net, **({how: True} if how in ("gradient_as_bucket_view", "static_graph") else {}))
    clip = RankClip(model)
    heard = ""
    losses(model)(batch(rank, turn=1)).mean().backward()
    try:
        if how == "no_sync":
            with model.no_sync():
                losses(model)(batch(rank, turn=2)).mean().backward()
        if how == "scaled down":
            nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        losses(model)(batch(rank, turn=3)).mean().backward()
    except RuntimeError as error:
        heard = str(error)
    net.zero_grad()
    losses(model)(batch(rank)).mean().backward()
    return heard, grads(net), clip.step


@cases("to none", "to zeros", "late", "windows", "windows of zeros", "bucket views", "evaluated")
def rank_clip_emptied(rank: int, how: str) -> Any:
    """Steps that are no mistakes."""
    net = Net()
    model = Ddp(net, gradient_as_bucket_view=how == "bucket views")
    RankClip(model)
    x, y = batch(rank)
    for _ in range(3):
        if how == "evaluated":
            model(x)  # with gradients on, and never differentiated
        if how != "late":
            net.zero_grad(set_to_none="zeros" not in how and how != "bucket views")
        if "windows" in how:
            with model.no_sync():
                for rows in (slice(0, 2), slice(2, 4)):
                    (losses(model)((x[rows], y[rows])).sum() / 6).backward()
            loss = losses(model)((x[4:], y[4:])).sum() / 6
        else:
            loss = losses(model)((x, y)).mean()
        if how == "late":
            net.zero_grad()
        loss.backward()
    return grads(net)


@cell
def rank_clip_unused(rank: int) -> Any:
    net = Net()
    model = Ddp(net, find_unused_parameters=True)
    RankClip(model)
    for _ in range(2):
        net.zero_grad()
        if rank == 1:  # the head is not used
            net.forward = lambda x: torch.tanh(net.body(x))
        model(batch(rank)[0])[:, :3].square().mean().backward()
    return grads(net)
