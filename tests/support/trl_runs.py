"""TRL's trainers on tiny models and data made here, with a slow twin of every step.

The twin collates each micro-batch on its own and differentiates the stock trainer's own loss of it.
"""

import copy
import gc
import tempfile

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import SequentialSampler
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from microclip.integrations.trl import (
    ClippedDPOTrainer,
    ClippedRewardTrainer,
    ClippedSFTTrainer,
)

import properties
import reference

datasets.disable_progress_bars()
gc.collect()
gc.freeze()  # every train() collects garbage: exempt the imports

COUNT = 14  # examples; with 8 in a step, the last step has 6
WORDS = [f"w{i}" for i in range(20)]
CONFIGS = {"sft": SFTConfig, "dpo": DPOConfig, "reward": RewardConfig}
SHAPE = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 32, "max_position_embeddings": 64,
}  # fmt: skip


def tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model(kind, stack="sft", dtype=torch.float32):
    """Return a tiny model whose gradients differ clearly between examples."""
    torch.manual_seed(0)
    common = {"vocab_size": 3 + len(WORDS), "pad_token_id": 0, "eos_token_id": 1}
    if kind == "gpt2":
        config = GPT2Config(
            n_embd=16, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=1, **common,
        )  # fmt: skip
        return GPT2LMHeadModel(config).to(dtype)
    config = (LlamaConfig if kind == "llama" else Qwen2Config)(**common, **SHAPE)
    if stack == "reward":
        config.num_labels = 1
        heads = LlamaForSequenceClassification, Qwen2ForSequenceClassification
    else:
        heads = LlamaForCausalLM, Qwen2ForCausalLM
    return heads[kind != "llama"](config).to(dtype)


def _words(generator, count):
    return " ".join(WORDS[i] for i in torch.randint(0, 20, (count,), generator=generator).tolist())


def data(stack, count=COUNT):
    """Return a data set; texts differ in length, the longest in the first batch."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i in range(count):
        prompt, length = _words(generator, 2 + i % 3), 3 + (7 * i + 5) % 6
        answers = [" " + _words(generator, length + extra) for extra in (0, i % 2)]
        row = {"prompt": prompt, "id": 100 + i, "place": "ab"[i % 2]}
        if stack == "sft":
            row["completion"] = answers[0]
        else:
            row |= {"chosen": answers[0], "rejected": answers[1]}
        rows.append(row)
    return datasets.Dataset.from_list(rows)


class InOrder:
    """Takes the examples in order, without shuffling."""

    def _get_train_sampler(self, *args):
        return SequentialSampler(self.train_dataset)


class PlainSft(InOrder, SFTTrainer):
    pass


class PlainDpo(InOrder, DPOTrainer):
    pass


class PlainReward(InOrder, RewardTrainer):
    pass


class Sft(InOrder, ClippedSFTTrainer):
    pass


class Dpo(InOrder, ClippedDPOTrainer):
    pass


class Reward(InOrder, ClippedRewardTrainer):
    pass


PLAIN = {"sft": PlainSft, "dpo": PlainDpo, "reward": PlainReward}
CLIPPED = {"sft": Sft, "dpo": Dpo, "reward": Reward}


def trainer(stack, net, *, kind=None, clip=None, watch=(), examples=None, folder=None, peft=None,
            reference_model=None, eval_dataset=None, words=None, **arguments):  # fmt: skip
    """Return a trainer; without `clip` the stock one."""
    options = {
        "per_device_train_batch_size": 8, "learning_rate": 0.0, "num_train_epochs": 1,
        "max_grad_norm": 0.0, "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "logging_strategy": "no", "bf16": False, "max_length": 32,
        "gradient_checkpointing": False, **arguments,
    }  # fmt: skip
    if stack == "reward":
        options.setdefault("disable_dropout", True)
    args = CONFIGS[stack](folder or tempfile.mkdtemp(), **options)
    kind = kind or (PLAIN if clip is None else CLIPPED)[stack]
    more = {} if peft is None else {"peft_config": peft}
    precomputed = arguments.get("precompute_ref_log_probs")
    if stack == "dpo" and peft is None and not precomputed and reference_model is not False:
        torch.manual_seed(7)
        frozen = copy.deepcopy(net)
        with torch.no_grad():  # a reference that differs, as after some training
            for parameter in frozen.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        more["ref_model"] = reference_model or frozen
    return kind(
        net, args=args, train_dataset=data(stack) if examples is None else examples,
        processing_class=words or tokenizer(), callbacks=list(watch), eval_dataset=eval_dataset,
        **more, **(clip or {}),
    )  # fmt: skip


def steps(count, size):
    return [list(range(i, min(i + size, count))) for i in range(0, count, size)]


def stock_loss(run, rows):
    """Return the stock trainer's own loss of some examples, collated on their own."""
    names = run._signature_columns or []
    rows = [{k: v for k, v in run.train_dataset[row].items() if k in names} for row in rows]
    stock = next(base for base in type(run).__mro__ if base.__module__.startswith("trl."))
    return stock.compute_loss(run, run.model, run.data_collator(rows))


def gradients(run, pieces):
    """Return the gradient of each micro-batch, by the stock loss."""
    run._set_signature_columns_if_needed()
    run.model.train()
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    return reference.microbatch_gradients(lambda rows: stock_loss(run, rows), parameters, pieces)


def twin(run, rows, b, weigh, domains=None):
    """Return the gradient of one step, by the stock loss of every micro-batch and the reference."""
    pieces = [rows[i : i + (b or len(rows))] for i in range(0, len(rows), b or len(rows))]
    found = gradients(run, pieces)
    return reference.clipped_gradient(found, [len(p) for p in pieces], weigh, domains=domains)[0]


def clipped(stack, net, b=None, **options):
    """Train one epoch without moving; return the trainer and the gradients of its steps."""
    clip = {"microbatch_size": b, **options.pop("clip", {})}
    watch = Watch()
    run = trainer(stack, net, clip=clip, watch=[watch], **options)
    run.train()
    return run, watch.gradients


def check(stack, net, b, rule="MinNorm()", **options):
    """Compare all steps with the twin; return the trainer."""
    clip = {"rule": properties.RULES[rule], **options.pop("clip", {})}
    run, found = clipped(stack, net, b, clip=clip, **options)
    size = run.args.per_device_train_batch_size * run.args.gradient_accumulation_steps
    taken = steps(len(run.train_dataset), size)
    assert len(found) == len(taken)
    for gradient, rows in zip(found, taken, strict=True):
        expected = twin(run, rows, b, reference.WEIGH[rule])
        assert reference.norm(expected) > 0
        properties.assert_close(gradient, expected, 1e-5)
    return run


class Watch(TrainerCallback):
    """Keeps the gradients that the optimizer is about to use."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        trained = [p for p in model.parameters() if p.requires_grad]
        self.gradients.append([None if p.grad is None else p.grad.clone() for p in trained])
