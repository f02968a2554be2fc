"""Mistakes with ranks: each gives the gradient of one process, or a clear error."""

import pytest
import torch

import processes
import properties
import rank_cells as cells
import reference

WORLD = cells.WORLD


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What both ranks found, by cell: a result, an error, warnings."""
    return processes.run(
        cells.work, WORLD, tmp_path_factory.mktemp("ranks"), list(cells.CELLS), seconds=20
    )


def named(prefix):
    return [name for name in cells.CELLS if name == prefix or name.startswith(f"{prefix} ")]


def expected(*, b=2, weigh="MinNorm()", rows=6, ranks=range(WORLD), domains=None, net=None):
    """Return what plain autograd gives for the micro-batches of these ranks."""
    net = net or cells.Net()
    pieces, labels = [], []
    for rank in ranks:
        x, y = cells.batch(rank, rows)
        order = [[i for i in range(rows) if domains is None or i % 2 == part] for part in (0, 1)]
        for domain, chosen in enumerate(order if domains else order[:1]):
            for start in range(0, len(chosen), b):
                cut = chosen[start : start + b]
                pieces.append((x[cut], y[cut]))
                labels.append(domain)
    gradients = reference.microbatch_gradients(
        lambda batch: cells.losses(net)(batch).mean(), list(net.parameters()), pieces
    )
    sizes = [len(x) for x, _ in pieces]
    return reference.clipped_gradient(
        gradients, sizes, reference.WEIGH[weigh], "mean", b, labels if domains else None
    )[0]


def results(found, name):
    """Return what the ranks found, which none of them may have failed at."""
    assert [each[name][1] for each in found] == [""] * WORLD
    return [each[name][0] for each in found]


def assert_exact(found, name, wanted):
    given = results(found, name)
    for gradients in given:
        properties.assert_close(gradients, wanted, 1e-12)
    for one, other in zip(*given, strict=True):  # to the last bit
        assert torch.equal(one, other)


EXACT = [
    *named("beside_a_wrapper"),
    *named("wrapped_inside"),
    *named("wrapped"),
    "beside_a_wrapper_own_backward",
    "inside_of_the_wrapper_and_set_right",
    "copies_and_pickles_of_a_watched_model",
    *[f"evaluated_with_gradients {engine}" for engine in ("stream", "two_pass", "fused", "auto")],
    "evaluated_with_gradients_between_chunks",
    "does_not_differ rule without repr",
    *named("does_not_differ")[1:],
    *[f"stranger {which}" for which in ("teacher", "frozen", "inside")],
]


@pytest.mark.parametrize("name", EXACT)
def test_exact(found, name):
    assert_exact(found, name, expected())


@pytest.mark.parametrize(
    "name", [*named("rank_clip"), *named("rank_clip_emptied"), "rank_clip_accumulates"]
)
def test_rank_clip(found, name):
    assert_exact(found, name, expected(b=6))


def test_a_forward_pass_without_backward_and_an_own_backward(found):
    assert_exact(found, "evaluated_with_gradients own", expected(b=6))


REFUSED = {
    **dict.fromkeys(named("inside_of_the_wrapper"), "Make the Clipper with the wrapper"),
    **dict.fromkeys(named("inside_of_the_wrapper_variant"), "Make the Clipper with the wrapper"),
    "inside_of_the_wrapper_own_backward": "Make the Clipper with the wrapper",
    "wrapped_twice_and_the_other_called": "Make the Clipper with the wrapper",
    **dict.fromkeys(named("averaged_before_fold"), "was outside of it"),
    "evaluated_with_gradients own module": "was outside of it",
    "wrappers_for_different_ranks": "for different ranks ([0",
    "fully_sharded_of_old": "Use fully_shard(model) (FSDP2)",
    **dict.fromkeys(named("hooked"), "has a communication hook (BuiltinCommHookType.FP16"),
    **dict.fromkeys(["hooked before", "hooked after"], "hook (fp16_compress_hook)"),
    "hooked power": "hook (powerSGD_hook)",
    **dict.fromkeys(["hooked rank clip", "hooked rank clip after"], "either RankClip or Clipper"),
    "stranger trained": "around a Net, which averages gradients over ranks",
    "label_without_a_name": "its repr contains a memory address",
    "ignored_parameter": "told to ignore parameter 'head.weight'",
    "joined": "Leave join() out",
    "delayed": "delay_all_reduce_named_params",
    "differs size": "microbatch_size (rank 0: 2, rank 1: 3)",
    "differs size or none": "microbatch_size (rank 0: 2, rank 1: None)",
    "differs rule": "rule (rank 0: MinNorm(), rank 1: Unit())",
    "differs rule's number": "rule (rank 0: Fixed(c=1.0), rank 1: Fixed(c=2.0))",
    "differs own rule": "rule (rank 0: Own({'power': 1.0}), rank 1: Own({'power': 2.0}))",
    "differs state": "rule's state (rank 0: {'power': 1.0}",
    "differs reduction": "reduction (rank 0: mean, rank 1: sum)",
    "differs nonfinite": "nonfinite (rank 0: skip, rank 1: propagate)",
    "differs scale": "grad_scaler (rank 0: scale 1.0, rank 1: scale 2.0)",
    "differs scaler": "grad_scaler (rank 0: scale 65536.0, rank 1: none)",
    **dict.fromkeys(
        named("parameters_differ"),
        "'module.head.bias' (rank 0: float64 [3], rank 1: frozen or missing)",
    ),
    "parameters_differ values": "the values of parameter 'module.body.bias' (rank 0: checksum",
    "parameters_differ head": "the values of parameter 'head.weight' (rank 0: checksum",
    "parameters_differ dtype": "'head.weight' (rank 0: float64 [3, 5], rank 1: float32 [3, 5])",
    "parameters_differ new": "'module.more' (rank 0: frozen or missing, rank 1: float64 [2])",
    **dict.fromkeys(named("communicates_and_cannot"), "they have [3, 0] (rank 1 has no more"),
    "communicates_and_cannot uneven": "they have [3, 2]",
    "communicates_and_cannot idle first": "they have [0, 3] (rank 0 has no more to come)",
    "communicates_and_cannot chunks uneven": "they have [3, 3] (rank 1 has no more to come)",
    "communicates_and_cannot one rank": "they have [3, 3] (rank 1 has no more to come)",
    "communicates_and_cannot fused": "communicates with other ranks (c10d::allreduce_)",
    "communicates_and_cannot skip": "would not run a skipped micro-batch again",
    "rank_clip_twice": "has a communication hook already (_take_bucket)",
    "rank_clip_and_another": "has a communication hook already (fp16_compress_hook)",
    "rank_clip_plain": "needs the DistributedDataParallel wrapper, but got Net",
    "rank_clip_differs": "rule (rank 0: MinNorm(), rank 1: Unit())",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_all_ranks(found, name):
    for each in found:
        assert REFUSED[name] in each[name][1]
        assert "AssertionError" not in each[name][1]  # `.grad` is unchanged


@pytest.mark.parametrize("name", ["no_wrapper", "inside_of_the_wrapper_but_local"])
def test_unwrapped_ranks_are_warned_once(found, name):
    for rank, gradients in enumerate(results(found, name)):
        properties.assert_close(gradients, expected(ranks=[rank]), 1e-12)
        (message,) = found[rank][name][2]
        assert "There are 2 ranks, but the model is not wrapped" in message


def test_frozen_parameters_may_be_ignored(found):
    net = cells.Net()
    net.head.requires_grad_(False)
    pieces = [(x[i : i + 2], y[i : i + 2]) for x, y in map(cells.batch, (0, 1)) for i in (0, 2, 4)]
    gradients = reference.microbatch_gradients(
        lambda batch: cells.losses(net)(batch).mean(), list(net.body.parameters()), pieces
    )
    wanted = reference.clipped_gradient(gradients, [2] * 6, reference.WEIGH["MinNorm()"])[0]
    assert_exact(found, "ignored_and_frozen", wanted)


@pytest.mark.parametrize("name", named("plain_and_clipped_steps"))
def test_plain_steps_between(found, name):
    net = cells.Net()
    parts = [torch.autograd.grad(cells.losses(net)(cells.batch(r)).mean(), list(net.parameters()))
             for r in range(WORLD)]  # fmt: skip
    plain = [(a + b) / 2 for a, b in zip(*parts, strict=True)]
    clipped, alone = expected(), expected(ranks=[0])
    for steps in results(found, name):
        for turn in range(4):
            properties.assert_close(steps[2 * turn], plain, 1e-12)
            properties.assert_close(steps[2 * turn + 1], alone if turn == 1 else clipped, 1e-12)


@pytest.mark.parametrize("name", named("labels"))
def test_equal_labels_are_one_domain(found, name):
    assert_exact(found, name, expected(domains=True))


def test_domains_on_one_rank(found):
    alone = [expected(ranks=[rank]) for rank in range(WORLD)]
    assert_exact(found, "domains_on_one_rank", [(a + b) / 2 for a, b in zip(*alone, strict=True)])


def communicating(kind, turns=(0,)):
    """Return the gradient for losses that look at the same micro-batch of the other rank."""
    net = cells.Net()
    gradients = []
    for rank in range(WORLD):
        for start in (0, 2, 4):
            pieces = [tuple(t[start : start + 2] for t in cells.batch(r)) for r in range(WORLD)]
            x, y = pieces[rank]
            if kind == "normalised":
                count = sum(int((y == 0).sum()) + 1 for _, y in pieces)
                loss = cells.losses(net)((x, y)).sum() / count
            elif kind == "gathered":
                everybody = torch.cat([net(x).detach() for x, _ in pieces])
                output = net(x)
                loss = (
                    torch.logsumexp(output @ everybody.T, 1) - output.gather(1, y[:, None])[:, 0]
                ).mean()
            else:
                loss = cells.losses(net)((x, y)).mean()
            gradients.append(torch.autograd.grad(loss, list(net.parameters())))
    return gradients


@pytest.mark.parametrize("name", named("communicates"))
def test_losses_that_communicate(found, name):
    gradients = communicating(name.split()[1])
    wanted = reference.clipped_gradient(gradients, [2] * 6, reference.WEIGH["MinNorm()"])[0]
    assert_exact(found, name, wanted)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("communicates_later", "gathered"),
        ("communicates_in_a_branch", "gathered"),
        *[(name, "normalised") for name in ["communicates_in_chunks", *named("communicates_by")]],
    ],
)
def test_losses_that_communicate_later_or_in_chunks(found, name, kind):
    wanted = reference.clipped_gradient(communicating(kind), [2] * 6, reference.WEIGH["MinNorm()"])[
        0
    ]
    assert_exact(found, name, wanted)


@pytest.mark.parametrize("name", named("communicates_alone"))
def test_a_loss_that_communicates_and_a_model_that_is_not_wrapped(found, name):
    gradients = communicating("normalised")
    for rank, given in enumerate(results(found, name)):
        mine = gradients[3 * rank : 3 * rank + 3]
        wanted = reference.clipped_gradient(mine, [2] * 3, reference.WEIGH["MinNorm()"])[0]
        properties.assert_close(given, wanted, 1e-12)


def test_a_call_that_is_broken_off_leaves_no_trace(found):
    for auto, stream in results(found, "communicates_and_draws"):
        assert all(torch.equal(one, other) for one, other in zip(auto, stream, strict=True))


def test_a_rank_that_fails_and_goes_on_is_in_step(found):
    one, other = results(found, "a_rank_fails_and_goes_on")
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(bool(gradient.isfinite().all()) for gradient in one)


@pytest.mark.parametrize("name", named("scaled"))
def test_loss_scaling(found, name):
    scales = [2048.0, 1024.0, 2048.0] if "propagate" in name else [2048.0, 4096.0, 8192.0]
    for gradients, seen in results(found, name):
        assert seen == scales
        properties.assert_close(gradients, expected(), 1e-12)


def test_rank_clip_with_gradients_of_zero(found):
    alone = [g / 2 for g in expected(b=6, ranks=[0])]
    for gradients, _ in results(found, "rank_clip_zero one rank"):
        properties.assert_close(gradients, alone, 1e-12)
    for gradients, _ in results(found, "rank_clip_zero all ranks"):
        assert not any(gradient.any() for gradient in gradients)


def test_rank_clip_with_loss_scaling(found):
    net = cells.Net()
    gradients = reference.microbatch_gradients(
        lambda batch: cells.losses(net)(batch).mean(),
        list(net.parameters()),
        [cells.batch(rank) for rank in range(WORLD)],
    )
    norms = [reference.norm(gradient) for gradient in gradients]
    assert min(norms) > 0.1
    wanted = [
        sum(0.1 / norm * part for norm, part in zip(norms, parts, strict=True)) / WORLD
        for parts in zip(*gradients, strict=True)
    ]
    assert_exact(found, "rank_clip_scaled", wanted)


def test_rank_clip_raises_and_goes_on(found):
    first, second = results(found, "rank_clip_raise")
    assert "micro-batch 0 of rank 1 is not finite" in first[0]
    assert "is not finite" in second[0] or "are not finite" in second[0]
    for _, gradients, steps in (first, second):
        assert steps == 1
        properties.assert_close(gradients, expected(b=6), 1e-12)


def test_rank_clip_with_a_layer_that_one_rank_does_not_use(found):
    gradients = []
    for rank in range(WORLD):
        net = cells.Net()
        output = net(cells.batch(0)[0]) if rank == 0 else torch.tanh(net.body(cells.batch(1)[0]))
        loss = output[:, :3].square().mean()
        each = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
        gradients.append([torch.zeros_like(p) if g is None else g
                          for p, g in zip(net.parameters(), each, strict=True)])  # fmt: skip
    wanted = reference.clipped_gradient(gradients, [6, 6], reference.WEIGH["MinNorm()"])[0]
    assert_exact(found, "rank_clip_unused", wanted)


@pytest.mark.parametrize("name", named("rank_clip_left_over"))
def test_rank_clip_refuses_to_clip_a_result_again(found, name):
    for heard, gradients, steps in results(found, name):
        assert "`.grad` held the clipped gradient of step 0" in heard
        assert steps == 2
        properties.assert_close(gradients, expected(b=6), 1e-12)
