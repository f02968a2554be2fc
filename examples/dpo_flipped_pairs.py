"""Teach a language model preferences with DPO, where a fifth of the pairs are flipped.

python examples/dpo_flipped_pairs.py                        # flipped pairs are found and held back
python examples/dpo_flipped_pairs.py --microbatch-size 4    # clipped instead
python examples/dpo_flipped_pairs.py --plain                # the stock DPOTrainer

To use your own model and data, replace LlamaForCausalLM(config), the tokenizer and the pairs. The
data set needs a column with ids; the line with ClippedDPOTrainer stays the same.
"""

import argparse
import copy
import random
import tempfile

from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer

import microclip
from microclip.integrations.trl import ClippedDPOTrainer
from microclip.issues import Issues

TOPICS = ("the plan", "your code", "this essay", "the report", "my recipe", "the design")
POLITE = ("it is good , add a test ?", "it looks fine , please check the end .", "thank you !")
RUDE = ("it is bad , throw it away !", "it looks awful , start again .", "it wastes my time !")
QUESTIONS = ("what of {} ?", "comment on {} :", "your view of {} ?")


def pairs(count: int, wrong: float, seed: int) -> list[dict[str, object]]:
    """Return pairs of answers, the polite one chosen, except in a fraction of them."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        polite, rude = " " + rng.choice(POLITE), " " + rng.choice(RUDE)
        flipped = rng.random() < wrong
        chosen, rejected = (rude, polite) if flipped else (polite, rude)
        prompt = rng.choice(QUESTIONS).format(rng.choice(TOPICS))
        row = {"id": i, "prompt": prompt, "chosen": chosen, "rejected": rejected}
        found.append({**row, "flipped": flipped})
    return found


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are words."""
    text = " ".join((*QUESTIONS, *TOPICS, *POLITE, *RUDE))
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(f"<pad> <eos> {text}".split()))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, print what was found and how well the model answers, and return the logged losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plain", action="store_true", help="train without microclip")
    parser.add_argument("--microbatch-size", type=int, help="clip micro-batches instead")
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args(arguments)

    set_seed(0)
    disable_progress_bars()
    tokenizer = word_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    reference = copy.deepcopy(model)
    rows = pairs(240, wrong=0.2, seed=0)
    data = Dataset.from_list(rows)
    with tempfile.TemporaryDirectory() as folder:
        args = DPOConfig(
            folder, per_device_train_batch_size=options.batch_size, max_steps=options.steps,
            learning_rate=1e-3, logging_steps=max(options.steps // 10, 1), report_to="none",
            save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False,
            disable_tqdm=True,
        )  # fmt: skip
        common = {
            "ref_model": reference,
            "args": args,
            "train_dataset": data,
            "processing_class": tokenizer,
        }
        ledger = microclip.Ledger(f"{folder}/ledger")
        if options.plain:
            trainer = DPOTrainer(model, **common)
        elif options.microbatch_size is not None:
            trainer = ClippedDPOTrainer(
                model, **common, microbatch_size=options.microbatch_size, id_column="id"
            )
        else:
            # The only change. Every pair's loss is remembered, and those that stay bad while the
            # others are learned lose their weight.
            trainer = ClippedDPOTrainer(
                model, **common, rule=microclip.rules.LossHistory(), id_column="id", ledger=ledger
            )
        trainer.train()
        if not options.plain and options.microbatch_size is None:
            report(microclip.find_issues(ledger), {r["id"] for r in rows if r["flipped"]}, rows)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    # which answer of a pair has become likelier? only clean pairs count
    clean = trainer.evaluate(Dataset.from_list(pairs(100, wrong=0.0, seed=1)))
    print(f"accuracy on clean pairs: {clean['eval_rewards/accuracies']:.1%}")
    return [float(loss) for loss in losses]


def report(found: Issues, flipped: set[object], rows: list[dict[str, object]]) -> None:
    """Print what was flagged, and how much of it is really flipped."""
    flagged = set(found.ids())
    hits = len(flagged & flipped)
    print(found)
    for name in found.ids()[:3]:
        print(f"  {name}: {rows[name]['prompt']} Chosen:{rows[name]['chosen']}")
    print(f"precision {hits / max(1, len(flagged)):.1%}, recall {hits / max(1, len(flipped)):.1%}")


if __name__ == "__main__":
    main()
