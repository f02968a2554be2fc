"""Adapters of peft: exact in every engine, and only what is trained costs anything."""

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from transformers import LlamaConfig, LlamaForSequenceClassification

from microclip.engines.base import CannotFuseError

import properties
import reference
import trl_runs
from trainers import ONE_BATCH, Watch, clipped, examples, own_loss, stacked, trainer

LINEAR = ["q_proj", "v_proj", "down_proj"]
ADAPTERS = {
    "LoRA": lambda task: LoraConfig(
        task_type=task, r=2, target_modules=LINEAR, init_lora_weights=False
    ),
    "rsLoRA": lambda task: LoraConfig(
        task_type=task, r=2, target_modules="all-linear", use_rslora=True, init_lora_weights=False
    ),
    "DoRA": lambda task: LoraConfig(
        task_type=task, r=2, target_modules=LINEAR, use_dora=True, init_lora_weights=False
    ),
    "LoRA with a trained embedding": lambda task: LoraConfig(
        task_type=task, r=2, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False
    ),
    "IA3": lambda task: IA3Config(
        task_type=task, target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    ),
    "LoHa": lambda task: LoHaConfig(
        task_type=task, r=2, target_modules=["q_proj"], init_weights=False
    ),
    "VeRA": lambda task: VeraConfig(task_type=task, r=2, target_modules=["q_proj"]),
    "prompt tuning": lambda task: PromptTuningConfig(task_type=task, num_virtual_tokens=3),
    "p-tuning": lambda task: PromptEncoderConfig(
        task_type=task, num_virtual_tokens=3, encoder_hidden_size=8
    ),
    "prefix tuning": lambda task: PrefixTuningConfig(task_type=task, num_virtual_tokens=3),
}  # fmt: skip


def adapted(name, task="CAUSAL_LM"):
    net = trl_runs.model("llama")
    if task == "SEQ_CLS":
        torch.manual_seed(0)
        shape = {"vocab_size": 23, "pad_token_id": 0, "num_labels": 3, **trl_runs.SHAPE}
        net = LlamaForSequenceClassification(LlamaConfig(**shape))
    torch.manual_seed(3)
    return get_peft_model(net, ADAPTERS[name](task))


@pytest.mark.sample(13)
@pytest.mark.parametrize("engine", ["stream", "two_pass", "fused"])
@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQ_CLS"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_in_the_trainer(tmp_path, name, task, engine):
    model, watch = adapted(name, task), Watch()
    data = examples("llama" if task == "CAUSAL_LM" else "bert")
    run = trainer(
        tmp_path, model, data, b=2, watch=[watch], clip={"engine": engine},
        per_device_train_batch_size=8, gradient_accumulation_steps=1,
    )  # fmt: skip
    if name == "LoHa" and engine == "fused":  # its product is a function of autograd's own kind
        with pytest.raises(CannotFuseError, match="cannot tell which example owns which loss"):
            run.train()
        return
    run.train()
    assert run.clipper.outcome.engine == engine
    model.train()
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    for step, found in enumerate(watch.gradients[:2]):
        rows = [list(range(8 * step + i, 8 * step + i + 2)) for i in range(0, 8, 2)]
        twin = clipped(model, own_loss, [stacked(data, part) for part in rows], [2] * 4)
        assert reference.norm([g for g in twin if g is not None]) > 0
        properties.assert_close(found, twin, 1e-5)


def test_a_regularized_adapter_is_streamed(tmp_path):
    """AdaLoRA adds a penalty to the loss, which no example owns."""
    config = AdaLoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=9, init_r=2, target_r=1
    )
    model, watch, data = get_peft_model(trl_runs.model("llama"), config), Watch(), examples("llama")
    run = trainer(tmp_path, model, data, b=2, watch=[watch], **ONE_BATCH)
    run.train()
    assert run.clipper.outcome.engine == "stream"
    rows = [list(range(i, i + 2)) for i in range(0, 8, 2)]
    twin = clipped(model.train(), own_loss, [stacked(data, part) for part in rows], [2] * 4)
    properties.assert_close(watch.gradients[0], twin, 1e-5)


@pytest.mark.sample(11)
@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("stack", ["sft", "dpo"])
@pytest.mark.parametrize("name", [name for name in ADAPTERS if "embedding" not in name])
def test_adapters_in_trl(name, stack, b):
    engine, config = "stream" if name == "LoHa" else "fused", ADAPTERS[name]("CAUSAL_LM")
    run = trl_runs.check(stack, trl_runs.model("llama"), b, peft=config, clip={"engine": engine})
    assert run.clipper.outcome.engine == engine


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["LoRA", "DoRA", "IA3", "prefix tuning"])
def test_one_microbatch_is_plain_fine_tuning(name):
    """With an adapter, too, a whole batch as one micro-batch is the stock trainer's step."""
    weights = []
    for clip in (None, {}):
        config = ADAPTERS[name]("CAUSAL_LM")
        run = trl_runs.trainer(
            "sft", trl_runs.model("llama"), clip=clip, peft=config, learning_rate=0.01,
            gradient_checkpointing=name != "prefix tuning",
        )  # fmt: skip
        run.train()
        weights.append([p.detach().clone() for p in run.model.parameters()])
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)
