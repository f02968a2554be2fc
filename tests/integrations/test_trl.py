"""TRL's real trainers: gradients equal those of the stock loss, micro-batch by micro-batch."""

import pytest
import torch

import properties
import reference
import trl_runs

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")


@pytest.mark.sample(37)
@pytest.mark.parametrize(
    "rule", ["MinNorm()", "Unit()", "Median(rescale=False)", "Mean(rescale=True)"]
)
@pytest.mark.parametrize("engine", ["stream", "two_pass", "fused"])
@pytest.mark.parametrize("b", [1, 3, 4])
@pytest.mark.parametrize(
    ("stack", "kind"),
    [("sft", "llama"), ("sft", "gpt2"), ("sft", "qwen2"), ("dpo", "llama"), ("dpo", "gpt2"),
     ("dpo", "qwen2"), ("reward", "llama"), ("reward", "qwen2")],
)  # fmt: skip
def test_gradients_equal_the_twin(stack, kind, b, engine, rule):
    if engine == "stream" and not properties.RULES[rule].streams:
        engine = "auto"
    run = trl_runs.check(stack, trl_runs.model(kind, stack), b, rule, clip={"engine": engine})
    assert engine in ("auto", run.clipper.outcome.engine)


@pytest.mark.parametrize("stack", ["sft", "dpo", "reward"])
def test_auto_takes_the_single_pass(stack):
    """It checks itself on the way; ids and domains come from the data set."""
    options = {"id_column": "id", "domain_column": "place"}
    run, _ = trl_runs.clipped(stack, trl_runs.model("llama", stack), 1, clip=options)
    outcome = run.clipper.outcome
    assert outcome.engine == "fused"
    assert outcome.example_losses is not None
    assert sorted(i for ids in outcome.ids for i in ids) == list(range(108, 114))
    assert outcome.domains == ("a",) * 3 + ("b",) * 3


@pytest.mark.parametrize("stack", ["sft", "dpo", "reward"])
def test_one_microbatch_is_the_stock_trainer(stack):
    """With dropout, checkpointing and a global bound, bit for bit; and so are its logs."""
    weights, logs = [], []
    for clip in (None, {}):
        net = trl_runs.model("qwen2", stack)
        net.config.attention_dropout = 0.1
        for layer in net.model.layers:
            layer.self_attn.attention_dropout = 0.1
        dropout = {} if stack == "sft" else {"disable_dropout": False}
        run = trl_runs.trainer(
            stack, net, clip=clip, learning_rate=0.01, max_grad_norm=1.0, num_train_epochs=2,
            gradient_checkpointing=stack != "dpo", logging_steps=1, logging_strategy="steps",
            **dropout,
        )  # fmt: skip
        run.train()
        weights.append([p.detach().clone() for p in net.parameters()])
        logs.append(run.state.log_history[:-1])
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)
    for stock, ours in zip(*logs, strict=True):
        for name in set(stock) - {"grad_norm"}:
            assert ours[name] == pytest.approx(stock[name], rel=1e-6)


@pytest.mark.sample(4)
@pytest.mark.parametrize("stack", ["sft", "dpo", "reward"])
@pytest.mark.parametrize("b", [2, 8])
def test_accumulated_batches(stack, b):
    """Micro-batches are part of a batch, or span several."""
    trl_runs.check(
        stack, trl_runs.model("llama", stack), b,
        per_device_train_batch_size=4, gradient_accumulation_steps=2,
    )  # fmt: skip


def test_default_settings_of_trl():
    """Gradient checkpointing and bfloat16, which TRL turns on unless told otherwise."""
    run, found = trl_runs.clipped(
        "sft", trl_runs.model("llama"), 2, bf16=True, gradient_checkpointing=True
    )
    run.args.bf16 = False
    for gradient, rows in zip(found, trl_runs.steps(14, 8), strict=True):
        twin = trl_runs.twin(run, rows, 2, reference.WEIGH["MinNorm()"])
        properties.assert_close(gradient, twin, 0.05)


@pytest.mark.sample(2)
@pytest.mark.parametrize("engine", ["auto", "stream"])
def test_checkpointed_activations(engine):
    trl_runs.check(
        "sft", trl_runs.model("qwen2"), 2, clip={"engine": engine}, gradient_checkpointing=True
    )
