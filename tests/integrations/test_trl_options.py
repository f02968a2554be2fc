"""Options of TRL: exact, or refused by name. Its loops: evaluation, checkpoints, memory."""

import datasets
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer

from microclip import Ledger, rules
from microclip.integrations.transformers import ClippedTrainerMixin
from microclip.integrations.trl import ClippedSFTTrainer, ClippedTrlMixin
from microclip.ledger import open_ledger

import properties
import reference
import trl_runs
from trl_runs import check

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")

SINGLE_PASS = ("sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "bco_pair", "apo_zero")
STREAMED = ("exo_pair", "nca_pair", "sppo_hard", "apo_down", "discopop", "sft")


@pytest.mark.sample(9)
@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("name", [*SINGLE_PASS, *STREAMED])
def test_losses_of_dpo(name, b):
    options = {"label_smoothing": 0.1} if name in ("robust", "exo_pair") else {}
    if name == "discopop":  # by default so steep that float32 has an error of 1e-5
        options = {"discopop_tau": 1.0}
    run = check("dpo", trl_runs.model("llama"), b, loss_type=[name], beta=0.3, **options)
    assert (run._losses.reason == "") == (name in SINGLE_PASS)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": ["sigmoid", "bco_pair"], "loss_weights": [0.5, 2.0]},
        {"ld_alpha": 0.5},
        {"use_weighting": True},
        {"f_divergence_type": "js_divergence"},
        {"precompute_ref_log_probs": True},
        {"max_length": 6},
        {"max_length": 6, "truncation_mode": "keep_end"},
    ],
    ids=str,
)
def test_options_of_dpo(options):
    check("dpo", trl_runs.model("qwen2"), 2, **options)


def test_a_reference_model_that_follows():
    """It is another one in every step; without clipping, steps are the stock trainer's."""
    found = []
    for clip in (None, {"rule": rules.Keep(), "microbatch_size": 1}):
        watch = trl_runs.Watch()
        run = trl_runs.trainer(
            "dpo", trl_runs.model("llama"), clip=clip, watch=[watch], learning_rate=0.01,
            sync_ref_model=True, ref_model_sync_steps=1, optim="sgd",
        )  # fmt: skip
        run.train()
        found.append(watch.gradients)
    for stock, ours in zip(*found, strict=True):
        properties.assert_close(ours, stock, 1e-5)


@pytest.mark.parametrize("engine", ["stream", "fused"])
def test_margins_and_centered_rewards(engine):
    data = trl_runs.data("reward").add_column("margin", [0.1 * i for i in range(trl_runs.COUNT)])
    check(
        "reward", trl_runs.model("llama", "reward"), 1, clip={"engine": engine}, examples=data,
        center_rewards_coefficient=0.5,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"loss_type": "dft"}, {"label_smoothing_factor": 0.1}], ids=str
)
def test_other_losses_of_sft(options):
    run = check("sft", trl_runs.model("llama"), 2, **options)
    assert run.clipper.outcome.engine == ("fused" if "loss_type" in options else "stream")


def test_whole_texts():
    """Without completions, prompts are part of the loss."""
    texts = [{"text": f"{row['prompt']}{row['completion']}"} for row in trl_runs.data("sft")]
    data = trl_runs.datasets.Dataset.from_list(texts)
    run = check("sft", trl_runs.model("gpt2"), 2, examples=data)
    assert run.clipper.outcome.engine == "fused"


def test_only_the_assistant_counts():
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content|trim }} "
        "<eos> {% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
    )
    chats = [
        {"messages": [{"role": "user", "content": row["prompt"]},
                      {"role": "assistant", "content": row["completion"]}] * (1 + i % 2)}
        for i, row in enumerate(trl_runs.data("sft"))
    ]  # fmt: skip
    words = trl_runs.tokenizer()
    words.chat_template = template
    run = check(
        "sft", trl_runs.model("llama"), 2, examples=trl_runs.datasets.Dataset.from_list(chats),
        assistant_only_loss=True, words=words,
    )  # fmt: skip
    labels = [label for row in run.train_dataset["labels"] for label in row]
    assert -100 in labels
    assert run.clipper.outcome.engine == "fused"


def test_a_loss_of_your_own_is_streamed():
    class Doubled(trl_runs.InOrder, SFTTrainer):
        def compute_loss(self, *args, **kwargs):
            return 2 * super().compute_loss(*args, **kwargs)

    class Clipped(ClippedTrlMixin, Doubled):
        pass

    run, found = trl_runs.clipped("sft", trl_runs.model("llama"), 2, kind=Clipped)
    assert run._losses.reason == "compute_loss is overridden"
    twin = trl_runs.twin(run, list(range(8)), 2, reference.WEIGH["MinNorm()"])
    properties.assert_close(found[0], [2 * g for g in twin], 1e-5)


@pytest.mark.parametrize("stack", ["dpo", "reward"])
def test_a_pair_of_equal_answers_is_named(stack):
    """Its gradient is rounding noise, and under MinNorm nothing may be longer."""
    rows = [dict(row) for row in trl_runs.data(stack)]
    for i in (3, 11):
        rows[i]["rejected"] = rows[i]["chosen"]
    data, clip = datasets.Dataset.from_list(rows), {"microbatch_size": 1, "id_column": "id"}
    clip["engine"] = "two_pass"  # a single pass has other noise
    run = trl_runs.trainer(stack, trl_runs.model("llama", stack), clip=clip, examples=data)
    with pytest.warns(RuntimeWarning, match="pair 103 .* two answers are equal") as found:
        run.train()
    assert sum("two answers" in str(each.message) for each in found) == 1  # once
    clip["rule"] = rules.Median()
    trl_runs.trainer(stack, trl_runs.model("llama", stack), clip=clip, examples=data).train()


@pytest.mark.parametrize("case", ["fused", "example", "wide"])
def test_reentrant_checkpoints(case):
    """Their backward pass cannot be asked for the gradients of some parameters only."""
    options = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    }
    if case == "wide":
        options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
        check("sft", trl_runs.model("llama"), 4, **options)
    else:
        clip = {"engine": "fused"} if case == "fused" else {"loss_mean": "example"}
        run = check("sft", trl_runs.model("llama"), 1, clip=clip, **options)
        assert run._losses.reason == ""


def test_embeddings_instead_of_tokens():
    class Mine(trl_runs.Sft):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(inputs_embeds=inputs["embeddings"], labels=inputs["labels"]).loss

    def collate(rows):
        labels = torch.tensor([row["input_ids"][:4] for row in rows])
        return {"embeddings": torch.nn.functional.one_hot(labels, 23)[..., :16].float(),
                "labels": labels}  # fmt: skip

    def build(*args, **options):
        return Mine(*args, data_collator=collate, **options)

    run = trl_runs.trainer("sft", trl_runs.model("llama"), kind=build, clip={"microbatch_size": 1})
    run.train()
    assert run.clipper.step == 2


def test_experts_are_streamed():
    """The auxiliary loss of a micro-batch is that of its own tokens."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=23, pad_token_id=0, eos_token_id=1, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=8, shared_expert_intermediate_size=8, output_router_logits=True,
        router_aux_loss_coef=0.5, **trl_runs.SHAPE,
    )  # fmt: skip
    run = check("sft", Qwen2MoeForCausalLM(config), 2)
    assert run.clipper.outcome.engine == "stream"
    assert "auxiliary loss" in run._losses.reason


def test_an_adapter_whose_reference_is_the_bare_model():
    """And one that was trained before, whose reference is a copy of it."""
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    run = check("dpo", trl_runs.model("llama"), 1, peft=lora)
    names = [name for name, p in run.model.named_parameters() if p.requires_grad]
    assert names
    assert all("lora" in name for name in names)
    trained = get_peft_model(trl_runs.model("llama"), lora)
    run = check("dpo", trained, 1, reference_model=False)
    assert "ref" in run.model.peft_config
    assert run.clipper.outcome.engine == "fused"


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 5


@pytest.mark.filterwarnings("ignore:LossHistory holds back")
@pytest.mark.sample(2)
@pytest.mark.parametrize("stack", ["dpo", "sft"])
def test_resuming_gives_the_same_weights(tmp_path, stack):
    """Rule, record of examples and ledger go on where they were."""
    found = []
    for folder, interrupted in ((tmp_path / "whole", False), (tmp_path / "parts", True)):
        options = {
            "folder": str(folder), "learning_rate": 0.02, "num_train_epochs": 8,
            "save_strategy": "steps", "save_steps": 5,
        }  # fmt: skip
        for resume in (False, True) if interrupted else (False,):
            rule = rules.LossHistory(total_steps=16)
            clip = {"rule": rule, "id_column": "id", "ledger": Ledger(folder / "ledger")}
            stop = [Stop()] if interrupted and not resume else []
            net = trl_runs.model("llama")
            frozen = trl_runs.model("llama")
            run = trl_runs.trainer(
                stack, net, clip=clip, watch=stop, reference_model=frozen, **options
            )
            run.train(resume_from_checkpoint=resume)
        found.append([p.detach().clone() for p in net.parameters()])
        rows = [
            r for part in open_ledger(folder / "ledger").microbatches() for r in part.to_pylist()
        ]
        assert sorted({row["step"] for row in rows}) == list(range(16))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.sample(3)
@pytest.mark.parametrize("stack", ["dpo", "sft", "reward"])
def test_evaluation_is_the_stock_trainers(stack):
    """Also in the middle of training: its batches are not pairs, and ids are not there."""
    logs = []
    for clip in (None, {"microbatch_size": 2, "id_column": "id", "domain_column": "place"}):
        run = trl_runs.trainer(
            stack, trl_runs.model("llama", stack), clip=clip, eval_dataset=trl_runs.data(stack),
            eval_strategy="steps", eval_steps=1, logging_steps=1, logging_strategy="steps",
        )  # fmt: skip
        run.train()
        logs.append([entry for entry in run.state.log_history if "eval_loss" in entry])
    assert len(logs[0]) == len(logs[1]) == 2
    for stock, ours in zip(*logs, strict=True):
        for name in (n for n in stock if "runtime" not in n and "per_second" not in n):
            assert ours[name] == pytest.approx(stock[name], rel=1e-6)


@pytest.mark.sample(3)
@pytest.mark.parametrize("stack", ["reward", "dpo", "sft"])
def test_metrics_of_a_single_pass(stack):
    """Tokens are counted once, however often engines call a loss."""
    logs = []
    for clip in (None, {"microbatch_size": 1}, {"microbatch_size": 4, "engine": "two_pass"}):
        run = trl_runs.trainer(
            stack, trl_runs.model("llama", stack), clip=clip, logging_steps=1,
            logging_strategy="steps",
        )  # fmt: skip
        run.train()
        logs.append([entry for entry in run.state.log_history if "loss" in entry])
    accuracy = {"sft": "num_tokens", "dpo": "rewards/accuracies", "reward": "accuracy"}[stack]
    for step, (stock, *others) in enumerate(zip(*logs, strict=True)):
        for ours in others:
            assert ours["num_tokens"] == stock["num_tokens"]
            if step == 0:  # the second step has micro-batches of different sizes
                assert ours[accuracy] == pytest.approx(stock[accuracy], rel=1e-5)


def test_flipped_pairs_are_held_back(tmp_path):
    """A rule that remembers, its ledger, and the ids of the data set."""
    rows = []
    for i in range(64):
        good, bad = " w1 w2 w3", " w7 w8 w9"
        answers = (bad, good) if i % 8 == 0 else (good, bad)
        rows.append({"prompt": f"w{10 + i % 9} w4", "chosen": answers[0], "rejected": answers[1],
                     "id": i})  # fmt: skip
    rule = rules.LossHistory()
    clip = {"rule": rule, "id_column": "id", "ledger": Ledger(tmp_path)}
    run = trl_runs.trainer(
        "dpo", trl_runs.model("llama"), clip=clip, learning_rate=0.01, num_train_epochs=12,
        per_device_train_batch_size=16, examples=trl_runs.datasets.Dataset.from_list(rows),
        reference_model=trl_runs.model("llama"),
    )  # fmt: skip
    run.train()
    outcome = run.clipper.outcome
    names = [i for ids in outcome.ids for i in ids]
    weights = dict(zip(names, outcome.example_weights.tolist(), strict=True))
    assert max(weight for i, weight in weights.items() if i % 8 == 0) < 0.5
    assert min(weight for i, weight in weights.items() if i % 8) > 0.5


@pytest.mark.parametrize(
    ("options", "clip", "message"),
    [
        ({"activation_offloading": True}, {}, "offloading=True moves .* Use gradient_ch"),
    ],
)  # fmt: skip
def test_refused_options_of_sft(options, clip, message):
    with pytest.raises(NotImplementedError, match=message):
        trl_runs.trainer("sft", trl_runs.model("llama"), clip=clip, **options)


def test_packed_batches_are_one_microbatch_each():
    run, found = trl_runs.clipped(
        "sft", trl_runs.model("llama"), packing=True, packing_strategy="wrapped", max_length=16
    )
    twin = trl_runs.twin(run, list(range(8)), None, reference.WEIGH["MinNorm()"])
    properties.assert_close(found[0], twin, 1e-5)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_losses_that_sort_a_batch_are_refused(name):
    with pytest.raises(NotImplementedError, match=f"loss_type='{name}' sorts .*sigmoid"):
        trl_runs.clipped("dpo", trl_runs.model("llama"), 1, loss_type=[name])
    check("dpo", trl_runs.model("llama"), None, loss_type=[name])  # a whole batch has a loss


def test_means_over_tokens_of_pairs_are_refused():
    with pytest.raises(ValueError, match="loss_mean='example' is about .* Leave it out"):
        trl_runs.clipped("dpo", trl_runs.model("llama"), 1, clip={"loss_mean": "example"})


def test_a_collator_that_is_not_understood_is_refused():
    def interleaved(features):
        rows = [row for f in features for row in (f["chosen_ids"], f["rejected_ids"], [0])]
        longest = max(map(len, rows))
        return {"input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in rows])}

    run = trl_runs.trainer("reward", trl_runs.model("llama", "reward"), clip={"microbatch_size": 1})
    run.data_collator = interleaved
    with pytest.raises(NotImplementedError, match="24 rows of 'input_ids' out of 8 pairs"):
        run.train()


@pytest.mark.parametrize(
    ("base", "message"),
    [(GRPOTrainer, "cannot clip GRPOTrainer exactly: it generates .* loop of your own"),
     (RLOOTrainer, "RLOOTrainer exactly: it generates"),
     (KTOTrainer, "KTOTrainer exactly: it compares .* Use ClippedDPOTrainer")],
)  # fmt: skip
def test_other_trainers_are_refused(base, message):
    with pytest.raises(TypeError, match=message):
        type("Mine", (ClippedTrlMixin, base), {})


def test_a_trainer_that_extends_a_known_one_is_refused():
    """Its own training step would be lost."""
    from trl.experimental.gkd import GKDTrainer

    with pytest.raises(TypeError, match="cannot clip GKDTrainer exactly"):
        type("Mine", (ClippedTrlMixin, GKDTrainer), {})


def test_recording_only():
    """`Keep`, with the mean over a step's tokens, is the stock trainer's gradient."""
    clip = {"rule": rules.Keep(), "microbatch_size": 1, "loss_mean": "step", "id_column": "id"}
    _, found = trl_runs.clipped("sft", trl_runs.model("llama"), 1, clip=clip)
    watch = trl_runs.Watch()
    trl_runs.trainer("sft", trl_runs.model("llama"), watch=[watch]).train()
    for ours, stock in zip(found, watch.gradients, strict=True):
        properties.assert_close(ours, stock, 1e-6)


def test_the_right_mixin_is_named():
    with pytest.raises(TypeError, match="Use ClippedTrainerMixin"):
        type("Mine", (ClippedTrlMixin, Trainer), {})
    for base in (SFTTrainer, DPOTrainer, RewardTrainer):
        with pytest.raises(TypeError, match=r"class Mine\(ClippedTrlMixin, "):
            type("Mine", (ClippedTrainerMixin, base), {})
    with pytest.raises(TypeError, match="SFTTrainer comes before ClippedTrainerMixin"):
        type("Mine", (SFTTrainer, ClippedTrlMixin), {})
    assert issubclass(ClippedSFTTrainer, Trainer)


def test_a_training_step_of_your_own_is_refused():
    class Mine(SFTTrainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    with pytest.raises(TypeError, match=r"Mine.training_step would never be called"):
        type("Clipped", (ClippedTrlMixin, Mine), {})


@pytest.mark.parametrize("engine", ["fused", pytest.param("auto", marks=pytest.mark.full)])
def test_a_pair_of_equal_answers_does_not_mix_pairs(engine):
    """Their gradients are rounding noise, which is not taken for a model that mixes pairs."""
    rows = [dict(row) for row in trl_runs.data("dpo")]
    for row in rows[1::2]:
        row["rejected"] = row["chosen"]
    clip = {"microbatch_size": 1, "rule": rules.Median(), "engine": engine}
    data = datasets.Dataset.from_list(rows)
    run = trl_runs.trainer("dpo", trl_runs.model("llama"), clip=clip, examples=data)
    run.train()  # a warning would be an error
    assert engine == "auto" or run.clipper.outcome.engine == "fused"
