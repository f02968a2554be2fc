"""The gradient noise scale against brute force, on one rank and on several."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import microclip
from microclip import Clipper, NoiseScale, rules

import processes

pytestmark = pytest.mark.filterwarnings("ignore:All . micro-batches have the same loss")

# a population of three examples, whose gradients these are
POPULATION = torch.tensor([[3.0, 1.0], [1.0, -2.0], [2.0, 4.0]], dtype=torch.float64)
MEAN = POPULATION.mean(0)
TRACE = (POPULATION - MEAN).square().sum(1).mean()


class Dot(nn.Module):
    """A model whose gradient for an example is the example itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x):
        return x @ self.weight


def noise_of(batch, size, **options):
    model = Dot()
    options = {"rule": rules.Keep(), "noise_scale": True, **options}
    return Clipper(model, size, **options).backward(model, batch).noise


@pytest.mark.parametrize("engine", ["stream", "two_pass", "fused"])
@pytest.mark.parametrize("size", [1, 2])
def test_unbiased_over_all_possible_batches(engine, size):
    """The mean over all 27 batches of three; with size 2, the last micro-batch is ragged."""
    found = [
        noise_of(POPULATION[list(rows)], size, engine=engine)
        for rows in itertools.product(range(3), repeat=3)
    ]
    trace = torch.stack([one.trace for one in found]).mean()
    squared = torch.stack([one.squared_norm for one in found]).mean()
    torch.testing.assert_close(trace, TRACE)
    torch.testing.assert_close(squared, MEAN.square().sum())


def test_by_hand():
    """Two gradients, (3, 0) and (1, 0): their mean is 2, their sample variance 2."""
    found = noise_of(torch.tensor([[3.0, 0.0], [1.0, 0.0]], dtype=torch.float64), 1)
    assert float(found.trace) == pytest.approx(2.0)
    assert float(found.squared_norm) == pytest.approx(4.0 - 2.0 / 2)
    assert float(found.scale) == pytest.approx(2 / 3)


def test_the_sum_is_as_noisy_as_the_mean():
    one, two = (noise_of(POPULATION, 1, reduction=how) for how in ("mean", "sum"))
    torch.testing.assert_close(one.trace, two.trace)
    torch.testing.assert_close(one.squared_norm, two.squared_norm)


def test_of_clipped_gradients():
    """With a rule, it is that of the rescaled gradients; a common factor does not matter."""
    batch = POPULATION[[0, 1, 2, 2]]
    clipped = noise_of(batch, 1, rule=rules.MinNorm())
    unit = noise_of(batch / batch.norm(dim=1, keepdim=True), 1)
    torch.testing.assert_close(clipped.scale, unit.scale)


def test_all_domains_together():
    whole = noise_of(POPULATION, 1)
    model = Dot()
    clipper = Clipper(model, 1, rule=rules.Keep(), noise_scale=True)
    found = clipper.backward(model, POPULATION, domains=["b", "a", "b"]).noise
    torch.testing.assert_close(found.scale, whole.scale)


def test_skipped_microbatches_do_not_count():
    batch = torch.cat([POPULATION, torch.full((1, 2), torch.nan, dtype=torch.float64)])
    with pytest.warns(RuntimeWarning, match="Skipped 1 of 4"):
        found = noise_of(batch, 1, nonfinite="skip")
    torch.testing.assert_close(found.scale, noise_of(POPULATION, 1).scale)


def test_one_microbatch_says_nothing():
    found = noise_of(POPULATION, None)
    assert found.trace.isnan()
    assert found.scale.isnan()


def test_loss_scaling_does_not_matter():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    x = POPULATION.float()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = [
        Clipper(model, 1, rule=rules.Keep(), grad_scaler=s, noise_scale=True)
        .backward(lambda x: model(x).square().mean(1), x)
        .noise.trace
        for s in (None, scaler)
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=0)


def test_only_where_asked_for():
    model = Dot()
    for rule in (rules.MinNorm(), rules.Keep()):
        outcome = Clipper(model, 1, rule=rule).backward(model, POPULATION)
        assert outcome.noise is None
        assert outcome.noise_scale is None
    with pytest.raises(ValueError, match="not available for rules that weight examples"):
        Clipper(model, 1, rule=rules.LossHistory(), noise_scale=True)
    with pytest.raises(ValueError, match="noise_scale must be True or False, but got 'on'"):
        Clipper(model, 1, noise_scale="on")


class TestAverage:
    def steps(self, count, spread=2.0):
        """Yield outcomes for examples with mean (1, 0) and this spread in both directions."""
        draw = torch.Generator().manual_seed(0)
        model = Dot()
        clipper = Clipper(model, 1, rule=rules.Keep(), noise_scale=True)
        for _ in range(count):
            noise = spread * torch.randn(16, 2, generator=draw, dtype=torch.float64)
            model.zero_grad()
            yield clipper.backward(model, torch.tensor([1.0, 0.0]) + noise)

    def test_finds_the_noise_scale(self):
        noise = NoiseScale(decay=0.999)
        for outcome in self.steps(400):
            noise.update(outcome)
        assert float(noise.scale) == pytest.approx(8.0, rel=0.25)
        assert noise.batch_size - 1 < float(noise.scale) <= noise.batch_size

    def test_state(self):
        first, second = NoiseScale(), NoiseScale()
        assert torch.isnan(first.scale)
        second.load_state_dict(first.state_dict())
        outcomes = list(self.steps(6))
        for outcome in outcomes[:3]:
            first.update(outcome)
        second.load_state_dict(first.state_dict())
        for outcome in outcomes[3:]:
            first.update(outcome)
            second.update(outcome)
        assert float(first.scale) == float(second.scale)

    def test_steps_that_are_not_finite_do_not_count(self):
        noise, model = NoiseScale(), Dot()
        (outcome,) = self.steps(1)
        noise.update(outcome)
        before = float(noise.scale)
        clipper = Clipper(model, 1, rule=rules.Keep(), noise_scale=True)
        noise.update(clipper.backward(model, POPULATION * torch.nan))
        assert float(noise.scale) == before

    def test_mistakes(self):
        with pytest.raises(ValueError, match="decay must be at least 0 and below 1, but got 1"):
            NoiseScale(1)
        model = Dot()
        with pytest.raises(ValueError, match="create the Clipper with noise_scale=True"):
            NoiseScale().update(Clipper(model, 1).backward(model, POPULATION))


def work(rank):
    """Return what a rank with some of the examples finds."""
    model = DistributedDataParallel(Dot())
    clipper = Clipper(model, 1, rule=rules.Keep(), noise_scale=True)
    mine = POPULATION[[0, 1, 2, 2]][[slice(0, 3), slice(3, 4)][rank]]
    noise = clipper.backward(model, mine).noise
    return noise.trace.item(), noise.squared_norm.item()


def test_several_ranks(tmp_path):
    whole = noise_of(POPULATION[[0, 1, 2, 2]], 1)
    for trace, squared in processes.run(work, 2, tmp_path):
        assert trace == pytest.approx(whole.trace.item())
        assert squared == pytest.approx(whole.squared_norm.item())


def test_exported():
    assert microclip.NoiseScale is NoiseScale


class TestDomains:
    """Each domain has the noise scale that it has alone."""

    BATCH = torch.cat([POPULATION, 2 * POPULATION[:2], POPULATION.flip(1)])
    DOMAINS = ("b", "b", "a", "a", "b", "a", "b", "b")

    def run(self, domains=DOMAINS, size=1, **options):
        model = Dot()
        options = {"rule": rules.Keep(), "noise_scale": True, **options}
        return Clipper(model, size, **options).backward(model, self.BATCH, domains=domains)

    @pytest.mark.parametrize("rule", [rules.Keep(), rules.MinNorm()])
    @pytest.mark.parametrize("size", [1, 2])
    @pytest.mark.parametrize("engine", ["stream", "fused", "auto"])
    def test_as_if_alone(self, engine, size, rule):
        outcome = self.run(size=size, engine=engine, rule=rule)
        for domain in "ab":
            rows = [row for row, name in enumerate(self.DOMAINS) if name == domain]
            alone = noise_of(self.BATCH[rows], size, rule=rule, engine="stream")
            found = outcome.domain_noise[domain]
            torch.testing.assert_close(found.trace, alone.trace)
            torch.testing.assert_close(found.squared_norm, alone.squared_norm)
            torch.testing.assert_close(outcome.noise_scales[domain], alone.scale)

    def test_of_chunks_in_any_order(self):
        model = Dot()
        clipper = Clipper(model, 1, rule=rules.Keep(), noise_scale=True)
        for rows in ([0, 2, 4], [5, 1], [3, 6, 7]):
            clipper.fold(model, self.BATCH[rows], domains=[self.DOMAINS[row] for row in rows])
        whole, found = self.run().domain_noise, clipper.finish().domain_noise
        for domain in "ab":
            torch.testing.assert_close(found[domain].trace, whole[domain].trace)

    def test_the_gradient_is_the_same(self):
        gradients = []
        for noise in (False, True):
            model = Dot()
            clipper = Clipper(model, 2, engine="fused", noise_scale=noise)
            clipper.backward(model, self.BATCH, domains=self.DOMAINS)
            gradients.append(model.weight.grad)
        torch.testing.assert_close(*gradients)

    def test_loss_scaling_does_not_matter(self):
        torch.manual_seed(0)
        model, x = nn.Linear(2, 1), self.BATCH.float()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        found = [
            Clipper(model, 1, rule=rules.Keep(), grad_scaler=s, noise_scale=True)
            .backward(lambda x: model(x).square().mean(1), x, domains=self.DOMAINS)
            .noise_scales["a"]
            for s in (None, scaler)
        ]
        torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=0)

    def test_averages(self):
        noise, other = NoiseScale(domain="a"), NoiseScale(domain="not there")
        outcome = self.run()
        noise.update(outcome)
        other.update(outcome)
        torch.testing.assert_close(noise.scale, outcome.noise_scales["a"])
        with pytest.warns(RuntimeWarning, match="had the domain 'not there', .* are 'a', 'b'"):
            assert torch.isnan(other.scale)

    def test_a_domain_that_comes_late_is_no_mistake(self):
        noise = NoiseScale(domain="a")
        noise.update(self.run(domains=["b"] * 8))
        noise.update(self.run())
        torch.testing.assert_close(noise.scale, self.run().noise_scales["a"])

    @pytest.mark.parametrize("options", [{"domains": None}, {"rule": rules.Median()}])
    def test_where_it_is_not_known(self, options):
        outcome = self.run(**options)
        assert outcome.noise_scales is None
        with pytest.raises(ValueError, match="of the domain 'a' alone is not known"):
            NoiseScale(domain="a").update(outcome)


def shard(rank, scope):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = fully_shard(nn.Linear(3, 2).double())
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(8, 3, generator=draw, dtype=torch.float64)
    # with scope="world", a micro-batch has rows of both ranks
    mine = [slice(0, 4), slice(4, 8)][rank]
    clipper = Clipper(model, 1, rule=rules.Keep(), noise_scale=True, scope=scope)
    noise = clipper.backward(lambda x: model(x).square().mean(1), x[mine]).noise
    return noise.trace.item(), noise.squared_norm.item()


@pytest.mark.full
@pytest.mark.parametrize("scope", ["rank", "world"])
def test_sharded_models(tmp_path, scope):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(8, 3, generator=draw, dtype=torch.float64)
    size = 1 if scope == "rank" else 2
    order = torch.arange(8) if scope == "rank" else torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    clipper = Clipper(model, size, rule=rules.Keep(), engine="stream", noise_scale=True)
    whole = clipper.backward(lambda x: model(x).square().mean(1), x[order]).noise
    for trace, squared in processes.run(shard, 2, tmp_path, scope):
        assert trace == pytest.approx(whole.trace.item())
        assert squared == pytest.approx(whole.squared_norm.item())
