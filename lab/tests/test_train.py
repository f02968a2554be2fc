"""The training loop in one process: results, files and errors."""

import json
import math
import os
import signal
from dataclasses import replace

import pytest
import torch
from torch import nn

import microclip
from microclip.report.runs import read_run
from microclip_lab.training.batch_rng import BatchRng
from microclip_lab.training.config import DivergedError, SettingError
from microclip_lab.training.interruption import Stopped
from microclip_lab.training.loading import Order
from microclip_lab.training.train import train

import reference
from tiny_recipe import Tiny, forget_accelerate, training, weights


@pytest.fixture(autouse=True)
def _alone():
    forget_accelerate()


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def by_hand(recipe, how, clip):
    """Train with a plain loop and the slow reference; return the weights."""
    data = recipe.load(how.seed)
    torch.manual_seed(how.seed)
    model = recipe.build(data)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
        lr=how.learning_rate,
        weight_decay=how.weight_decay,
    )
    order = Order(len(data.training), how.batch_size, how.seed)
    for step in range(how.steps):
        for group in optimizer.param_groups:
            group["lr"] = how.learning_rate * (1 - step / how.steps)
        rows = [data.training[i] for i in order.rows(step)]
        batch = recipe.collate(rows, BatchRng(how.seed, step, how.batch_size))
        size = how.microbatch_size if clip else how.batch_size
        pieces = [
            {name: values[i : i + size] for name, values in batch.items()}
            for i in range(0, how.batch_size, size)
        ]
        gradients = reference.microbatch_gradients(
            lambda piece: recipe.losses(model, piece).mean(), list(model.parameters()), pieces
        )
        wanted, _, _ = reference.clipped_gradient(
            gradients, [size] * len(pieces), reference.WEIGH["MinNorm()"]
        )
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("changes", [{}, {"chunk_size": 8}, {"engine": "fused"}, {"workers": 1}])
def test_clipped_training_is_the_twins(tmp_path, changes):
    how = training(out=tmp_path / "run", **changes)
    train(Tiny(), how)
    wanted = by_hand(Tiny(), how, clip=True)
    for name, found in weights(tmp_path / "run").items():
        assert torch.allclose(found, wanted[name], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("chunk", [None, 4])
def test_without_a_microbatch_size_it_is_plain_training(tmp_path, chunk):
    """Also in chunks, which must not be clipped like micro-batches."""
    how = training(out=tmp_path / "run", microbatch_size=None, chunk_size=chunk)
    train(Tiny(), how)
    wanted = by_hand(Tiny(), how, clip=False)
    for name, found in weights(tmp_path / "run").items():
        assert torch.allclose(found, wanted[name], rtol=1e-4, atol=1e-5), name


def test_what_a_run_leaves_behind(tmp_path):
    how = training(out=tmp_path / "run", page=True, trackers=("tensorboard",))
    finished = train(Tiny(domains=True), replace(how, by_domain=True))
    run = read_run(finished.path)
    assert finished.path == tmp_path / "run"
    assert (run.microbatch_size, run.seed, run.group) == (4, 0, "tiny")
    assert run.settings["learning_rate"] == "0.02"
    assert finished.metrics["test_accuracy"] == run.metrics["test_accuracy"][40]
    assert finished.metrics["test_points"] == 30
    assert finished.metrics["best_validation_accuracy"] == max(
        run.metrics["validation_accuracy"].values()
    )
    assert finished.metrics["best_test_accuracy"] > 0.8  # it has learnt
    assert len(run.metrics["validation_accuracy"]) == 20
    assert run.metrics["learning_rate"][40] == 0
    assert 0 < run.metrics["microclip/mean_weight"][10] <= 1
    assert json.loads((finished.path / "facts.json").read_text())["points"] == 96
    assert (finished.path / "report.html").stat().st_size > 1000
    assert next((finished.path / "tensorboard").glob("events*")).stat().st_size > 0
    record = microclip.ledger.open_ledger(finished.path / "ledger")
    assert record.steps == range(40)
    scored = microclip.draggers.score(finished.path / "ledger")
    assert {str(one)[:6] for one in scored.top(5)["id"].to_pylist()} == {"point-"}
    told = (finished.path / "examples.jsonl").read_text().splitlines()
    described = [json.loads(line) for line in told]
    assert len(described) == 96
    assert {line["domain"] for line in described} == {"near", "far"}
    assert all("text" in line for line in described)


def test_the_best_checkpoint_is_by_validation(tmp_path):
    """The weights of the best evaluation are kept, not the last ones; test data plays no part."""

    class Worse(Tiny):
        def summary(self, records):
            self_made = next(scores)
            return {"accuracy": self_made}

    scores = iter([0.2, 0.9, 0.3, 0.1, 0.55, 0.66])
    how = training(out=tmp_path / "run", steps=4, evaluate_every=1)
    finished = train(Worse(), how)
    assert finished.best_step == 2
    assert finished.metrics == {
        "validation_accuracy": 0.1,
        "test_accuracy": 0.55,
        "best_test_accuracy": 0.66,
        "best_validation_accuracy": 0.9,
    }
    folders = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert folders == ["best-000000002", "step-000000003", "step-000000004"]


def test_weights_to_begin_with(tmp_path):
    first = train(Tiny(), training(out=tmp_path / "first", steps=20))
    best = first.path / "checkpoints" / f"best-{first.best_step:09d}"
    how = training(out=tmp_path / "second", steps=1, learning_rate=1e-12, start_from=best)
    second = train(Tiny(), how)
    assert second.metrics["test_accuracy"] == first.metrics["best_test_accuracy"]


def test_weights_of_another_model(tmp_path):
    class Wider(Tiny):
        def build(self, data):
            return nn.Sequential(nn.Linear(2, 2))

    class Longer(Tiny):
        def build(self, data):
            return nn.Sequential(super().build(data), nn.Linear(2, 2))

    first = train(Tiny(), training(out=tmp_path / "first", steps=2))
    with pytest.raises(FileNotFoundError, match="has no model.safetensors. Give a folder"):
        train(Tiny(), training(out=tmp_path / "a", start_from=tmp_path))
    start = first.path / "checkpoints" / "step-000000002"
    with pytest.raises(
        SettingError, match=r"(?s)does not fit this model: .*size mismatch for 0.weight"
    ):
        train(Wider(), training(out=tmp_path / "b", start_from=start))
    with pytest.raises(
        SettingError, match=r"does not fit this model: it lacks \['0.0.weight'.*has \[.*0.bias"
    ):
        train(Longer(), training(out=tmp_path / "c", start_from=start))


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor"])
@pytest.mark.parametrize("schedule", ["cosine", "constant", "inverse_sqrt"])
def test_optimizers_and_schedules(tmp_path, optimizer, schedule):
    how = training(
        out=tmp_path / "run", optimizer=optimizer, schedule=schedule, warmup=0.25, log_every=1
    )
    finished = train(Tiny(), replace(how, learning_rate=0.1, max_grad_norm=5.0))
    rates = [line["learning_rate"] for line in lines(finished.path) if "learning_rate" in line]
    assert rates[0] == pytest.approx(0.01)  # a tenth of the way up
    assert max(rates) == pytest.approx(0.1)
    assert finished.metrics["best_test_accuracy"] > 0.7
    assert (rates[-1] == rates[10]) == (schedule == "constant")


def test_bfloat16(tmp_path):
    finished = train(Tiny(), training(out=tmp_path / "run", precision="bf16"))
    assert finished.metrics["best_test_accuracy"] > 0.8


class TestResume:
    """An interruption does not change the weights, with dropout and augmentation on."""

    recipe = Tiny(dropout=0.5)

    def how(self, path, **changes):
        # "auto" goes by the clock, which two runs need not agree on
        return training(out=path, engine="fused", **changes)

    def undisturbed(self, path, **changes):
        train(self.recipe, self.how(path, **changes))
        forget_accelerate()
        return weights(path)

    @pytest.mark.parametrize("changes", [{}, {"microbatch_size": None}, {"chunk_size": 8}])
    def test_bit_for_bit(self, tmp_path, changes):
        wanted = self.undisturbed(tmp_path / "a", **changes)
        how = self.how(tmp_path / "b", **changes)
        for until in (1, 7, 25, None):
            finished = train(self.recipe, replace(how, resume=True), until=until)
            assert finished.step == (until or 40)
            forget_accelerate()
        found = weights(tmp_path / "b")
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        a, b = (microclip.ledger.open_ledger(tmp_path / name / "ledger") for name in "ab")
        assert a.rows == b.rows
        assert a.steps == b.steps == range(40)

    def test_asked_to_stop(self, tmp_path):
        wanted = self.undisturbed(tmp_path / "a")

        def interrupt(step, figures):
            if step == 6:
                os.kill(os.getpid(), signal.SIGTERM)

        before = signal.getsignal(signal.SIGTERM)
        how = self.how(tmp_path / "b")
        with pytest.raises(Stopped, match="Stopped by SIGTERM after step 7") as stopped:
            train(self.recipe, how, watch=interrupt)
        assert stopped.value.exit_code == 143
        assert signal.getsignal(signal.SIGTERM) == before
        assert (tmp_path / "b" / "checkpoints" / "step-000000007").exists()
        train(self.recipe, replace(how, resume=True))
        found = weights(tmp_path / "b")
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    def test_an_error_in_between(self, tmp_path):
        wanted = self.undisturbed(tmp_path / "a")

        def fail(step, figures):
            if step == 20:
                raise RuntimeError("the disk is on fire")

        how = self.how(tmp_path / "b", checkpoint_every=9)
        with pytest.raises(RuntimeError, match="on fire"):
            train(self.recipe, how, watch=fail)
        assert (tmp_path / "b" / "checkpoints" / "step-000000018").exists()
        train(self.recipe, replace(how, resume=True))
        found = weights(tmp_path / "b")
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    def test_a_run_that_has_ended_says_again_what_came_out(self, tmp_path):
        how = training(out=tmp_path / "run")
        first = train(self.recipe, how)
        before = read_run(how.out).metrics
        again = train(self.recipe, replace(how, resume=True))
        assert again == first
        assert read_run(how.out).metrics == before  # the last step's loss and norms among them

    def test_a_run_is_not_written_over(self, tmp_path):
        how = training(out=tmp_path / "run", steps=2)
        train(self.recipe, how)
        before = weights(tmp_path / "run")
        with pytest.raises(FileExistsError, match="already holds a run. Use --resume"):
            train(self.recipe, how)
        with pytest.raises(SettingError, match=r"learning_rate was 0.02 and is now 0.5; seed was"):
            train(self.recipe, replace(how, resume=True, learning_rate=0.5, seed=3))
        with pytest.raises(SettingError, match=r"dropout was 0.5 and is now 0.1"):
            train(Tiny(dropout=0.1), replace(how, resume=True))
        assert all(torch.equal(before[name], now) for name, now in weights(how.out).items())

    def test_a_description_that_cannot_be_read(self, tmp_path):
        how = training(out=tmp_path / "run", steps=2)
        train(self.recipe, how)
        (tmp_path / "run" / "run.json").write_text("{")
        with pytest.raises(SettingError, match="cannot be read"):
            train(self.recipe, replace(how, resume=True))

    def test_one_process_at_a_time(self, tmp_path):
        how = training(out=tmp_path / "run", steps=4)

        def second(step, figures):
            with pytest.raises(FileExistsError, match="Another process is writing to"):
                train(self.recipe, replace(how, resume=True))

        assert train(self.recipe, how, watch=second).step == 4

    def test_resuming_what_has_not_begun(self, tmp_path):
        assert train(self.recipe, training(out=tmp_path / "run", resume=True, steps=2)).step == 2


def test_a_run_that_diverges_is_given_up(tmp_path):
    how = training(out=tmp_path / "run", log_every=1)
    with pytest.raises(DivergedError, match="not finite 3 times in a row, up to step 3"):
        train(Tiny(blow_up=math.inf), how)
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))  # none of ruined weights


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("validation", [], "has no validation examples"),
        ("ids", [1, 2], "has 96 training examples, but 2 ids"),
        ("domains", ["a"], "but 1 domains"),
    ],
)
def test_data_that_does_not_fit(tmp_path, name, value, message):
    class Odd(Tiny):
        def load(self, seed):
            return replace(super().load(seed), **{name: value})

    with pytest.raises(ValueError, match=message):
        train(Odd(), training(out=tmp_path / "run"))


def test_a_judge_that_forgets_examples(tmp_path):
    class Lazy(Tiny):
        def judge(self, model, batch):
            return []

    with pytest.raises(ValueError, match="one record per example, but returned 0 for 16"):
        train(Lazy(), training(out=tmp_path / "run"))


def test_a_summary_without_the_headline(tmp_path):
    class Silent(Tiny):
        def summary(self, records):
            return {"hits": 1.0}

    with pytest.raises(ValueError, match=r"the headline 'accuracy', but returned \['hits'\]"):
        train(Silent(), training(out=tmp_path / "run"))
