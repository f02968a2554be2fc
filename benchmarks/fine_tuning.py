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
plain training without the wrong examples. Every arm has its own learning rate, in factors of 2, by
validation data that is as dirty, on seeds that are used for nothing else.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    PrinterCallback,
    set_seed,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import microclip
from microclip.integrations.trl import ClippedDPOTrainer, ClippedRewardTrainer, ClippedSFTTrainer
from microclip_lab.evidence.sequential import interval
from microclip_lab.evidence.wording import table as as_table
from microclip_lab.jobs.progress import Status
from microclip_lab.tuned_arms.records import Identity, Job, or_worst, read_records
from microclip_lab.tuned_arms.runner import work_or_exit
from microclip_lab.tuned_arms.search import (
    PLAIN,
    evaluated,
    is_tuned,
    next_jobs,
    plain_rate,
    start_of,
    tuned,
)

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
MEASURED = {"sft": "eval_loss", "dpo": "eval_rewards/accuracies", "reward": "eval_accuracy"}
METRIC = {
    "sft": "loss on clean texts",
    "dpo": "accuracy on clean pairs",
    "reward": "accuracy on clean pairs",
}
UNIT, HISTORY, ORACLE = "unit-4", "loss-history", "oracle"
TITLES = {PLAIN: "plain", UNIT: "`Unit()`, b = 4", HISTORY: "`LossHistory()`", ORACLE: "oracle"}
EDITION = "2.1"
TRAIN, VALIDATION, TEST, EPOCHS, BATCH = 192, 160, 160, 8, 24
PROMPT, ANSWER = 4, 7  # words


@dataclass(frozen=True)
class Stack:
    """A trainer, as the search for learning rates sees it."""

    name: str
    start: int = 1
    tuning_seeds: tuple[int, ...] = tuple(range(100, 112))  # accuracies of 160 pairs are noisy


@dataclass(frozen=True)
class Record(Identity):
    """The result of a run: metrics on dirty validation and clean test data, what was flagged."""

    validation: float  # higher is better
    test: float
    precision: float | None = None  # of the flagged examples; None: nothing was flagged
    recall: float | None = None
    seconds: float = 0.0  # of processor time

    @property
    def last_validation(self) -> float:
        return or_worst(self.validation)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Record:
        return cls(**entry)


class Plan:
    """Tune each arm of each stack, plain training first; then evaluate it."""

    def __init__(self, seeds: int) -> None:
        self.seeds = range(seeds)

    def missing(self, records: dict[Job, Record]) -> Iterator[Job]:
        for stack in map(Stack, STACKS):
            for arm in TITLES:
                if start_of(records, stack, arm) is None:
                    continue
                searching = next_jobs(records, stack, arm)
                yield from searching
                if not searching:
                    rate = tuned(records, stack, arm).rate
                    jobs = [Job(stack.name, arm, "evaluate", rate, seed) for seed in self.seeds]
                    yield from (job for job in jobs if job not in records)

    def plain_rate_of(self, records: dict[Job, Record], task: str) -> float | None:
        return plain_rate(records, Stack(task))

    def progress(self, records: dict[Job, Record]) -> Status:
        pairs = [(stack, arm) for stack in map(Stack, STACKS) for arm in TITLES]
        over = sum(len(evaluated(records, *pair)) >= len(self.seeds) for pair in pairs)
        return Status(len(records), max(1, len(records)), over, len(pairs))


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


def run(job: Job, plain_rate: float | None = None) -> Record:
    """Train one arm once."""
    stack, rng = job.task, random.Random(job.seed)
    rows = sentences()[len(sentences()) // 2 :]
    rng.shuffle(rows)
    parts = [rows[:TRAIN], rows[TRAIN : TRAIN + TEST], rows[TRAIN + TEST :][:VALIDATION]]
    data, clean, dirty = (
        examples(stack, part, wrong, rng)
        for part, wrong in zip(parts, (WRONG[stack], 0.0, WRONG[stack]), strict=True)
    )
    wrong = {row["id"] for row in data if row["wrong"]}
    _, plain, clipped = STACKS[stack]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(stack, folder, seed=job.seed, learning_rate=job.rate)
        common = {"args": args, "processing_class": tokenizer()}
        if stack == "dpo":
            common["ref_model"] = fresh(stack, job.seed)
        model, started = fresh(stack, job.seed), time.process_time()
        if job.arm == PLAIN:
            trainer = plain(model, train_dataset=data, **common)
        elif job.arm == ORACLE:
            kept = data.filter(lambda row: not row["wrong"])
            trainer = plain(model, train_dataset=kept, **common)
        elif job.arm == HISTORY:
            ledger = microclip.Ledger(f"{folder}/ledger")
            rule = {"rule": microclip.rules.LossHistory(), "id_column": "id", "ledger": ledger}
            trainer = clipped(model, train_dataset=data, **rule, **common)
        else:
            rule = {"rule": microclip.rules.Unit(), "microbatch_size": 4}
            trainer = clipped(model, train_dataset=data, **rule, **common)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        if job.arm == HISTORY:
            flagged = set(microclip.find_issues(ledger).ids())
            hits = len(flagged & wrong)
            found["precision"] = hits / len(flagged) if flagged else None
            found["recall"] = hits / len(wrong)
        name, sign = MEASURED[stack], -1 if stack == "sft" else 1
        found["validation"] = sign * trainer.evaluate(dirty)[name]
        found["test"] = trainer.evaluate(clean)[name]
    identity = (job.task, job.arm, job.stage, job.rate, job.seed, EDITION)
    return Record(*identity, **found, seconds=round(time.process_time() - started, 2))


def prepared(job: Job, plain_rate: float | None) -> Record:
    """Do a run in a worker process."""
    disable_progress_bars()
    return run(job)


def read() -> dict[Job, Record]:
    """Return what was recorded so far."""
    current = {(stack, arm): EDITION for stack in STACKS for arm in TITLES}
    return read_records(FOLDER, current, Record.from_json)


def table() -> str:
    """Return the results: each arm, and its paired difference from plain training."""
    records, rows = read(), []
    for stack in map(Stack, STACKS):
        arms = [arm for arm in TITLES if is_tuned(records, stack, arm)]
        runs = {arm: evaluated(records, stack, arm) for arm in arms}
        seeds = sorted(set.intersection(*map(set, runs.values()))) if len(arms) > 1 else []
        for arm in arms if seeds else ():
            own = [runs[arm][seed] for seed in seeds]
            gap = interval([runs[arm][s].test - runs[PLAIN][s].test for s in seeds])
            said = f"{gap.mean:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})" if gap else ""
            precise = [each.precision for each in own if each.precision is not None]
            recalled = [each.recall for each in own if each.recall is not None]
            rate = tuned(records, stack, arm)
            rows.append(
                (
                    f"{stack.name}, {METRIC[stack.name]} ({len(seeds)} seeds)"
                    if arm == PLAIN
                    else "",
                    f"{TITLES[arm]} ({rate.rate:g}{', at the edge' if rate.is_at_edge else ''})",
                    f"{statistics.fmean(each.test for each in own):.3f}",
                    "" if arm == PLAIN else said,
                    f"{statistics.fmean(precise):.2f} ({len(precise)} runs)" if precise else "",
                    f"{statistics.fmean(recalled):.2f}" if recalled else "",
                )
            )
    headings = ("stack, metric", "arm (rate)", "mean", "difference from plain")
    return "\n".join(as_table((*headings, "precision", "recall"), rows))


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
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bars()
    if options.stage == "run":
        console = Console(soft_wrap=True, highlight=False)
        work_or_exit(Plan(options.seeds), read(), FOLDER, options.workers, console, prepared)
    else:
        print(table() if options.stage == "table" else cost(options.rounds))


if __name__ == "__main__":
    main()
