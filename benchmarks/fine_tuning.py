"""Fine-tuning on dirty data with TRL: what clipping and a rule that remembers gain, and cost.

python benchmarks/fine_tuning.py --stage run      # resumable: records in results/fine_tuning
python benchmarks/fine_tuning.py --stage table
python benchmarks/fine_tuning.py --stage cost     # time and memory beside the stock trainer

The data are sentences from docstrings of Python's standard library, as words. A small Llama is
trained on one half of them first. Then, per seed, it is fine-tuned on examples of the other half:
SFT to continue a sentence, where a tenth of the continuations are random words; DPO and a reward
model to prefer a continuation to one with half its words replaced, where a fifth of the pairs are
flipped.
Seeds are paired: all arms of a seed have the same data, order and initial weights. The oracle is
plain training without the wrong examples. Nothing was tuned, for any arm.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import microclip
from microclip.integrations.trl import ClippedDPOTrainer, ClippedRewardTrainer, ClippedSFTTrainer

from measure import interleaved, peak_memory, ratio

FOLDER = Path(__file__).parents[1] / "results" / "fine_tuning"
MODULES = (
    "argparse collections contextlib dataclasses decimal email functools heapq http inspect io "
    "itertools json logging math os pathlib pickle random re string tempfile threading"
)
STACKS = {
    "sft": (SFTConfig, SFTTrainer, ClippedSFTTrainer),
    "dpo": (DPOConfig, DPOTrainer, ClippedDPOTrainer),
    "reward": (RewardConfig, RewardTrainer, ClippedRewardTrainer),
}
WRONG = {"sft": 0.1, "dpo": 0.2, "reward": 0.2}
METRIC = {"sft": "loss on clean texts", "dpo": "accuracy on clean pairs",
          "reward": "accuracy on clean pairs"}  # fmt: skip
ARMS = ("plain", "Unit, b=4", "LossHistory", "oracle")
TRAIN, HELD_OUT, EPOCHS, BATCH = 192, 160, 8, 24
PROMPT, ANSWER = 4, 7  # words


@cache
def sentences() -> list[list[str]]:
    """Return sentences of docstrings as words, in a fixed order."""
    found = set()
    for name in MODULES.split():
        module = importlib.import_module(name)
        for member in [module, *vars(module).values()]:
            doc = getattr(member, "__doc__", None)
            for text in (doc if isinstance(doc, str) else "").replace("\n", " ").split(". "):
                words = [w for w in text.lower().split() if w.isalpha()]
                for start in range(0, len(words) - PROMPT - ANSWER + 1, PROMPT + ANSWER):
                    found.add(tuple(words[start : start + PROMPT + ANSWER]))
    shuffled = sorted(found)
    random.Random(0).shuffle(shuffled)
    return [list(words) for words in shuffled]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the most frequent words."""
    counts = Counter(word for words in sentences() for word in words)
    frequent = [word for word, _ in counts.most_common(500)]
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *frequent])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def examples(stack: str, rows: list[list[str]], wrong: float, rng: random.Random) -> Dataset:
    """Return a data set of texts or pairs, some of which are wrong."""
    vocabulary = [word for word in tokenizer().get_vocab() if not word.startswith("<")]
    found = []
    for i, words in enumerate(rows):
        answer, is_wrong = words[PROMPT:], rng.random() < wrong
        row = {"id": i, "prompt": " ".join(words[:PROMPT]), "wrong": is_wrong}
        spoiled = [rng.choice(vocabulary) if rng.random() < 0.5 else word for word in answer]
        good, mixed = " " + " ".join(answer), " " + " ".join(spoiled)
        garbage = " " + " ".join(rng.choices(vocabulary, k=ANSWER))
        if stack == "sft":
            row["completion"] = garbage if is_wrong else good
        else:
            row |= {"chosen": mixed if is_wrong else good, "rejected": good if is_wrong else mixed}
        found.append(row)
    return Dataset.from_list(found)


def arguments(stack: str, folder: str, **more: Any) -> Any:
    """Return the settings of a trainer."""
    options = {
        "per_device_train_batch_size": BATCH, "per_device_eval_batch_size": 80,
        "num_train_epochs": EPOCHS, "learning_rate": 2e-3, "lr_scheduler_type": "constant",
        "report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "bf16": False, "gradient_checkpointing": False, "logging_strategy": "no", **more,
    }  # fmt: skip
    return STACKS[stack][0](folder, **options)


@cache
def base() -> LlamaForCausalLM:
    """Return a language model pre-trained on the first half of the sentences."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer()), hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    rows = sentences()[: len(sentences()) // 2]
    texts = Dataset.from_list([{"text": " ".join(words)} for words in rows])
    with tempfile.TemporaryDirectory() as folder:
        args = arguments("sft", folder, max_steps=150, per_device_train_batch_size=48)
        SFTTrainer(model, args=args, train_dataset=texts, processing_class=tokenizer()).train()
    return model


def fresh(stack: str, seed: int) -> Any:
    """Return a copy of the base model, for rewards with a new head."""
    if stack != "reward":
        # TRL's head is bound to the model it was added to
        model = LlamaForCausalLM(base().config)
        model.load_state_dict(base().state_dict())
        return model
    config = copy.deepcopy(base().config)
    config.num_labels = 1
    set_seed(seed)
    model = LlamaForSequenceClassification(config)
    model.model.load_state_dict(base().model.state_dict())
    return model


def run(stack: str, arm: str, seed: int) -> dict[str, Any]:
    """Train one arm, and return what is recorded of it."""
    rng = random.Random(seed)
    rows = sentences()[len(sentences()) // 2 :]
    rng.shuffle(rows)
    data = examples(stack, rows[:TRAIN], WRONG[stack], rng)
    clean = examples(stack, rows[TRAIN : TRAIN + HELD_OUT], 0.0, rng)
    wrong = {row["id"] for row in data if row["wrong"]}
    _, plain, clipped = STACKS[stack]
    record: dict[str, Any] = {"stack": stack, "arm": arm, "seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(stack, folder, seed=seed)
        common = {"args": args, "processing_class": tokenizer()}
        if stack == "dpo":
            common["ref_model"] = fresh(stack, seed)
        model, started = fresh(stack, seed), time.perf_counter()
        if arm == "plain":
            trainer = plain(model, train_dataset=data, **common)
        elif arm == "oracle":
            kept = data.filter(lambda row: not row["wrong"])
            trainer = plain(model, train_dataset=kept, **common)
        elif arm == "LossHistory":
            ledger = microclip.Ledger(f"{folder}/ledger")
            rule = {"rule": microclip.rules.LossHistory(), "id_column": "id", "ledger": ledger}
            trainer = clipped(model, train_dataset=data, **rule, **common)
        else:
            rule = {"rule": microclip.rules.Unit(), "microbatch_size": 4}
            trainer = clipped(model, train_dataset=data, **rule, **common)
        trainer.train()
        record["seconds"] = round(time.perf_counter() - started, 2)
        if arm == "LossHistory":
            flagged = set(microclip.find_issues(ledger).ids())
            hits = len(flagged & wrong)
            record["precision"] = hits / len(flagged) if flagged else None
            record["recall"] = hits / len(wrong)
        found = trainer.evaluate(clean)
    name = {"sft": "eval_loss", "dpo": "eval_rewards/accuracies", "reward": "eval_accuracy"}[stack]
    record["metric"] = found[name]
    return record


def records(stack: str) -> list[dict[str, Any]]:
    """Return what was recorded of a stack so far."""
    path = FOLDER / f"{stack}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_all(seeds: int) -> None:
    """Run what is not recorded yet, seed by seed, so that any stop leaves whole pairs."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        for stack in STACKS:
            done = {(record["arm"], record["seed"]) for record in records(stack)}
            for arm in ARMS:
                if (arm, seed) not in done:
                    record = run(stack, arm, seed)
                    with (FOLDER / f"{stack}.jsonl").open("a") as file:
                        file.write(json.dumps(record) + "\n")
                    print(record, flush=True)


# two-sided 95 % quantiles of Student's t, by degrees of freedom
T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 11: 2.20}


def interval(values: list[float]) -> str:
    """Return a mean with its 95 % interval."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return f"{mean:+.3f}"
    half = T.get(n - 1, 2.1) * statistics.stdev(values) / math.sqrt(n)
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def table() -> str:
    """Return the results: each arm, and its paired difference from plain training."""
    lines = ["| stack, metric | arm | mean | difference from plain | precision | recall |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for stack in STACKS:
        found = {(r["arm"], r["seed"]): r for r in records(stack)}
        seeds = sorted({s for _, s in found if all((arm, s) in found for arm in ARMS)})
        for arm in ARMS if seeds else ():
            rows = [found[arm, seed] for seed in seeds]
            mean = statistics.fmean(r["metric"] for r in rows)
            gaps = [found[arm, s]["metric"] - found["plain", s]["metric"] for s in seeds]
            known = [r["precision"] for r in rows if r.get("precision") is not None]
            shares = [f"{statistics.fmean(known):.2f}" if known else "", ""]
            if arm == "LossHistory":  # where nothing was flagged, nothing was found
                shares[1] = f"{statistics.fmean(r['recall'] for r in rows):.2f}"
            gap = "" if arm == "plain" else interval(gaps)
            name = f"{stack}, {METRIC[stack]} ({len(seeds)} seeds)" if arm == "plain" else ""
            lines.append(f"| {name} | {arm} | {mean:.3f} | {gap} | {shares[0]} | {shares[1]} |")
    return "\n".join(lines)


def cost(rounds: int) -> str:
    """Return the time and memory of an SFT step as ratios to the stock trainer's."""
    lines = ["| | b | engine | time | memory |", "| --- | --- | --- | --- | --- |"]
    for name, peft in (("all parameters", None), ("LoRA", LoraConfig(r=8, task_type="CAUSAL_LM",
                       target_modules="all-linear"))):  # fmt: skip
        steps = {"stock": _step(None, peft)}
        for b in (1, 4):
            for engine in ("fused", "stream"):
                steps[f"{b}, {engine}"] = _step({"microbatch_size": b, "engine": engine}, peft)
        seconds = interleaved(steps, rounds)
        memory = {key: peak_memory(step) for key, step in steps.items()}
        for key in list(steps)[1:]:
            middle, low, high = ratio(seconds, key, "stock")
            b, engine = key.split(", ")
            used = memory[key] / memory["stock"]
            lines.append(
                f"| {name} | {b} | {engine} | {middle:.2f} ({low:.2f} to {high:.2f}) | {used:.2f} |"
            )
    return "\n".join(lines)


def _step(clip: dict[str, Any] | None, peft: Any) -> Any:
    """Return a function that computes the gradient of one batch of 16 texts of 64 tokens."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=2000, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    texts = [{"input_ids": torch.randint(3, 2000, (64,)).tolist()} for _ in range(16)]
    folder = tempfile.mkdtemp()
    args = arguments("sft", folder, per_device_train_batch_size=16, max_steps=1)
    kind = SFTTrainer if clip is None else ClippedSFTTrainer
    trainer = kind(
        LlamaForCausalLM(config), args=args, train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer(), peft_config=copy.deepcopy(peft), **(clip or {}),
    )  # fmt: skip
    trainer.train()  # prepares everything, and checks the losses of examples once
    (batch,) = list(trainer.get_train_dataloader())
    trainer.current_gradient_accumulation_steps = 1
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    items = batch["labels"][:, 1:].ne(-100).sum()

    def step() -> None:
        trainer.model.zero_grad()
        trainer.training_step(trainer.model_wrapped, dict(batch), items)

    return step


def main() -> None:
    """Run a stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--stage", choices=("run", "table", "cost"), required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bars()
    if options.stage == "run":
        run_all(options.seeds)
    else:
        print(table() if options.stage == "table" else cost(options.rounds))


if __name__ == "__main__":
    main()
