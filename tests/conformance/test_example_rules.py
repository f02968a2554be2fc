"""Rules that weight examples, against a twin that stores every example's gradient."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from microclip import Clipper
from microclip.rules import Fixed, LossHistory, Median, MinNorm, NormHistory, Unit

import properties
import reference
import zoo
from example_weights import Given

ENGINES = ("stream", "two_pass", "fused", "auto")


def twin(losses, parameters, weights, clip=None, b=None, domains=None, reduction="mean"):
    """Return sum_j W_j c_j g_j / max(sum W_j, B / 1000), and the losses."""
    gradients = []
    values = losses()
    for loss in values:
        found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        gradients.append([None if g is None else reference.wide(g) for g in found])
    count = len(weights)
    domains = domains or [None] * count
    order = sorted(range(count), key=lambda i: str(domains[i]))
    groups = []
    for _, members in itertools.groupby(order, key=lambda i: domains[i]):
        members = list(members)
        size = b or len(members)
        groups += [members[start : start + size] for start in range(0, len(members), size)]
    sums = [sum(weights[i] for i in group) for group in groups]
    means = [
        reference.weighted_sum(
            [gradients[i] for i in group],
            [weights[i] / total if total else 0.0 for i in group],
        )
        for group, total in zip(groups, sums, strict=True)
    ]
    factors = [1.0] * len(groups)
    norms = [reference.norm(mean) for mean in means]
    if clip is not None:
        labels = [domains[group[0]] for group in groups]
        for label in set(labels):
            rows = [j for j in range(len(groups)) if labels[j] == label and norms[j] > 0]
            found = reference.WEIGH[clip]([norms[j] for j in rows], [sums[j] for j in rows])
            for j, factor in zip(rows, found, strict=True):
                factors[j] = factor
    divisor = max(sum(weights), count / 1000)
    if reduction == "sum":
        divisor *= min(b or max(map(len, groups)), count) / count
    shares = [factor * total / divisor for factor, total in zip(factors, sums, strict=True)]
    return reference.weighted_sum(means, shares), values.tolist()


class Net(nn.Module):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 4))
        self.to(dtype)

    def forward(self, x):
        return self.body(x)


def problem(dtype=torch.float64, count=11):
    model = Net(dtype)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64).to(dtype)
    x = x * torch.linspace(0.3, 3, count).to(dtype)[:, None]
    y = torch.randint(0, 4, (count,), generator=generator)

    def losses(batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    return model, (x, y), losses


WEIGHTS = {
    "ones": [1.0] * 11,
    "some": [1, 0.3, 0, 1, 0, 0.7, 1, 0.02, 1, 0, 0.5],
    "few": [0, 0, 0, 0, 0.004, 0, 0, 0, 0, 0, 0],
    "none": [0.0] * 11,
    "large": [3.0, 1, 0, 2, 5, 1, 1, 1, 0.1, 1, 1],
}
CLIPS = {
    None: None,
    "MinNorm()": MinNorm(),
    "Unit()": Unit(),
    "Fixed(c=0.5)": Fixed(0.5),
    "Median(rescale=False)": Median(),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("b", [1, 3, None])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("domains", [None, list("abcabcabcab")])
def test_equals_twin(engine, clip, b, weights, domains):
    if engine == "stream" and clip == "Median(rescale=False)":
        pytest.skip("does not stream")
    model, batch, losses = problem()
    given = WEIGHTS[weights]
    rule = Given(given, clip=CLIPS[clip])
    clipper = Clipper(model, b, rule=rule, engine=engine)
    outcome = clipper.backward(losses, batch, ids=torch.arange(11), domains=domains)
    parameters = list(model.parameters())
    expected, values = twin(lambda: losses(batch), parameters, given, clip, b, domains)
    found = [p.grad for p in parameters]
    scale = max(reference.norm(expected), 1e-3)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-11 * scale
    names = [name for names in outcome.ids for name in names]
    assert outcome.example_weights.tolist() == [given[name] for name in names]
    seen = rule.seen[0]
    assert seen.keys.tolist() == names
    assert seen.losses.tolist() == pytest.approx([values[name] for name in names], rel=1e-12)
    assert outcome.loss.item() == pytest.approx(sum(values) / 11, rel=1e-12)
    assert int(outcome.held_back) == sum(w < 0.5 for w in given)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("clip", [None, "Unit()"])
@pytest.mark.parametrize("engine", ENGINES)
def test_reductions_and_chunks(engine, clip, reduction):
    model, batch, losses = problem()
    given = WEIGHTS["some"]
    rule = Given(given, clip=CLIPS[clip])
    clipper = Clipper(model, 3, rule=rule, engine=engine, reduction=reduction)
    for rows in (slice(0, 6), slice(6, 11)):
        part = tuple(each[rows] for each in batch)
        clipper.fold(losses, part, ids=torch.arange(11)[rows])
    clipper.finish()
    parameters = list(model.parameters())
    # two chunks of 6 and 5 are cut as 3, 3, 3, 2
    expected, _ = twin(lambda: losses(batch), parameters, given, clip, 3, reduction=reduction)
    properties.assert_close([p.grad for p in parameters], expected, 1e-11)
    assert rule.seen[0].keys.tolist() == list(range(11))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("b", [3, None])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_skipped_microbatch_might_as_well_be_missing(engine, b, reduction):
    """Also in the number of examples, which the sum is scaled by."""
    model, (x, y), losses = problem()
    given, domains = WEIGHTS["some"], ["a"] * 3 + ["b"] * 3 + ["c"] * 5
    x[4] = torch.inf
    found = []
    for rows in (list(range(11)), [0, 1, 2, 6, 7, 8, 9, 10]):
        model.zero_grad()
        rule, more = Given(given, clip=Unit()), {"reduction": reduction, "nonfinite": "skip"}
        clipper = Clipper(model, b, rule=rule, engine=engine, **more)
        names = {"ids": rows, "domains": [domains[row] for row in rows]}
        with pytest.warns(RuntimeWarning, match="Skipped 1") if 4 in rows else nullcontext():
            clipper.backward(losses, (x[rows], y[rows]), **names)
        found.append([parameter.grad for parameter in model.parameters()])
    properties.assert_close(*found, 1e-11)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("b", [1, 4])
def test_mean_losses_weight_microbatches(engine, b):
    """Without a loss per example, a micro-batch has the mean weight of its members."""
    model, batch, losses = problem()
    given = WEIGHTS["some"]
    if engine == "fused":
        pytest.skip("needs a loss per example")
    rule = Given(given)
    clipper = Clipper(model, b, rule=rule, engine=engine)
    calls = []

    def mean(part):
        calls.append(len(part[0]))
        return losses(part).mean()

    for _ in range(2):  # in the second step it is known
        model.zero_grad()
        outcome = clipper.backward(mean, batch, ids=range(11))
    groups = [list(range(11))[start : start + b] for start in range(0, 11, b)]
    units = [sum(given[i] for i in group) / len(group) for group in groups for _ in group]
    expected, _ = twin(lambda: losses(batch), list(model.parameters()), units)
    properties.assert_close([p.grad for p in model.parameters()], expected, 1e-11)
    assert outcome.weights.tolist() == pytest.approx([units[group[0]] for group in groups])
    assert 11 not in calls  # the first call, on all examples, left no trace


@pytest.mark.parametrize("engine", ["stream", "two_pass"])
def test_a_microbatch_that_is_held_back_does_not_set_the_bound(engine):
    """Its gradient is known if losses are means, and may be the smallest."""
    model, (x, y), losses = problem()
    given = [0.0, 0.0, 1, 0.5, 1, 1]
    found = []
    for rows in (list(range(6)), [2, 3, 4, 5]):
        model.zero_grad()
        clipper = Clipper(model, 2, rule=Given(given, clip=MinNorm()), engine=engine)
        outcome = clipper.backward(lambda batch: losses(batch).mean(), (x[rows], y[rows]), ids=rows)
        found.append([parameter.grad for parameter in model.parameters()])
        norms = outcome.norms.tolist()
        assert len(rows) == 4 or norms[0] < min(norms[1:])
        assert outcome.bound == min(norms[-2:])
    properties.assert_close(*found, 1e-11)


def test_mean_loss_of_a_whole_batch_is_refused():
    model, batch, losses = problem()
    clipper = Clipper(model, rule=Given(WEIGHTS["some"]))
    with pytest.raises(ValueError, match="returns the mean of 11 losses"):
        clipper.backward(lambda part: losses(part).mean(), batch, ids=range(11))
    assert all(p.grad is None for p in model.parameters())
    outcome = clipper.backward(losses, batch, ids=range(11))  # nothing is left to finish
    assert len(outcome) == 1


@pytest.mark.parametrize("engine", ["stream", "two_pass", "auto"])
def test_mean_losses_show_only_after_a_domain_of_one_example(engine):
    """Whose mean is its loss; what it added is undone."""
    model, batch, losses = problem()
    given, domains = WEIGHTS["some"], ["a"] + ["b"] * 10
    clipper = Clipper(model, 4, rule=Given(given), engine=engine)

    def mean(part):
        return losses(part).mean()

    groups = [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    units = [sum(given[i] for i in group) / len(group) for group in groups for _ in group]
    expected, _ = twin(lambda: losses(batch), list(model.parameters()), units)
    for _ in range(2):  # in the second step it is known
        model.zero_grad()
        outcome = clipper.backward(mean, batch, ids=range(11), domains=domains)
        assert [list(ids) for ids in outcome.ids] == groups
        properties.assert_close([p.grad for p in model.parameters()], expected, 1e-11)


def test_mean_losses_show_only_after_single_examples_were_folded():
    model, (x, y), losses = problem()
    clipper = Clipper(model, 4, rule=Given(WEIGHTS["some"]), engine="stream")

    def fold():
        clipper.fold(lambda part: losses(part).mean(), (x[:1], y[:1]), ids=[0])
        rest = {"ids": range(1, 11), "domains": ["a"] + ["b"] * 9}
        clipper.fold(lambda part: losses(part).mean(), (x[1:], y[1:]), **rest)

    with pytest.raises(ValueError, match="did not show while single examples were folded"):
        fold()
    fold()
    assert [len(ids) for ids in clipper.finish().ids] == [1, 1, 4, 4, 1]


def test_a_first_call_with_a_mean_leaves_no_trace():
    """Batch statistics and random numbers are those of a loss function whose kind was known."""

    def train(known):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4))
        _, batch, _ = problem(torch.float32)

        def mean(part):
            return nn.functional.cross_entropy(model(part[0]), part[1])

        clipper = Clipper(model, 4, rule=Given(WEIGHTS["some"]), engine="stream")
        if known:
            clipper._losses_of[next(iter(_names(mean)))] = False
        torch.manual_seed(2)
        clipper.backward(mean, batch, ids=range(11))
        return [*(p.grad for p in model.parameters()), *model.buffers(), torch.rand(1)]

    for one, other in zip(train(False), train(True), strict=True):
        assert torch.equal(one, other)


def _names(function):
    from microclip.engines.gradients import name_of

    return [name_of(function)]


@pytest.mark.parametrize("b", [None, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_of_one_are_plain_training_bit_for_bit(dtype, b):
    model, batch, losses = problem(dtype)
    clipper = Clipper(model, b, rule=LossHistory(100))
    clipper.backward(losses, batch, ids=range(11))
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    losses(batch).mean().backward()
    assert all(torch.equal(one, p.grad) for one, p in zip(found, model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["cnn_batchnorm", "gpt", "lstm", "frozen_and_unused"])
def test_any_model_in_one_pass(name):
    """With BatchNorm, too: what is weighted is the loss of one ordinary pass."""
    case = zoo.case(name, torch.float64)
    model, batch = case.model, case.batch
    loss_fn = case.each_loss_fn or case.loss_fn
    count = len(loss_fn(batch))
    given = [(3 * i % 7) / 6 for i in range(count)]
    state = copy.deepcopy(model.state_dict())
    torch.manual_seed(0)
    losses = loss_fn(batch)
    weights = torch.tensor(given, dtype=losses.dtype)
    model.zero_grad()
    (losses * weights / weights.sum()).sum().backward()
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    after = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    model.zero_grad()
    torch.manual_seed(0)
    Clipper(model, 1, rule=Given(given)).backward(loss_fn, batch, ids=range(count))
    properties.assert_close([p.grad for p in model.parameters()], expected, 1e-11)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, after[key])


@pytest.mark.parametrize("engine", ENGINES)
def test_norm_history_sees_the_norms_of_all_examples(engine):
    """Also of those that are held back."""
    model, batch, losses = problem()

    class Given2(Given):
        needs_norms = True

    given = WEIGHTS["some"]
    rule = Given2(given)
    Clipper(model, 1, rule=rule, engine=engine).backward(losses, batch, ids=range(11))
    parameters = list(model.parameters())
    expected, _ = twin(lambda: losses(batch), parameters, given)
    properties.assert_close([p.grad for p in parameters], expected, 1e-11)
    norms = []
    for loss in losses(batch):
        found = torch.autograd.grad(loss, parameters, retain_graph=True)
        norms.append(reference.norm(found))
    assert rule.seen[0].norms.tolist() == pytest.approx(norms, rel=1e-9)


def test_own_backward_is_weighted_by_microbatch():
    model, batch, losses = problem()
    given = WEIGHTS["some"]
    rule = Given(given)
    clipper = Clipper(model, rule=rule)
    groups = [list(range(4)), list(range(4, 8)), list(range(8, 11))]
    for group in groups:
        loss = losses(tuple(each[group] for each in batch)).mean()
        loss.backward()
        clipper.fold(size=len(group), loss=loss, ids=group)
    clipper.finish()
    units = [sum(given[i] for i in group) / len(group) for group in groups for _ in group]
    expected, _ = twin(lambda: losses(batch), list(model.parameters()), units)
    properties.assert_close([p.grad for p in model.parameters()], expected, 1e-11)
    losses(batch).mean().backward()
    with pytest.raises(ValueError, match="needs the loss"):
        clipper.fold(size=11, ids=range(11))


def test_norm_history_needs_single_examples():
    model, _, _ = problem()
    with pytest.raises(ValueError, match="microbatch_size=1 instead of 4"):
        Clipper(model, 4, rule=NormHistory())
