"""Fine-tune a language model with TRL on questions and answers, a tenth of them garbage.

python examples/sft_garbage_answers.py                        # garbage is found and held back
python examples/sft_garbage_answers.py --microbatch-size 4    # clipped instead
python examples/sft_garbage_answers.py --plain                # the stock SFTTrainer

To use your own model and data, replace LlamaForCausalLM(config), the tokenizer and the questions.
The data set needs a column with ids; the line with ClippedSFTTrainer stays the same.
"""

import argparse
import random
import tempfile

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import microclip
from microclip.integrations.trl import ClippedSFTTrainer
from microclip.issues import Issues

FACTS = (
    ("cow", "moos", "barn"), ("dog", "barks", "kennel"), ("cat", "meows", "house"),
    ("duck", "quacks", "pond"), ("sheep", "bleats", "meadow"), ("horse", "neighs", "stable"),
    ("frog", "croaks", "swamp"), ("bee", "buzzes", "hive"), ("owl", "hoots", "tree"),
    ("lion", "roars", "plain"), ("wolf", "howls", "forest"), ("mouse", "squeaks", "hole"),
)  # fmt: skip
WORDS = tuple(word for fact in FACTS for word in fact)
QUESTIONS = ("what does the {} do ?", "tell me about the {} :", "how does a {} sound ?",
             "describe the {} please .", "I wonder what a {} does .", "and the {} ?")  # fmt: skip
ANSWER = " the {} {} in the {} ."


def questions(count: int, wrong: float, seed: int) -> list[dict[str, object]]:
    """Return questions with answers, a fraction of which are words at random."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        animal, sound, home = rng.choice(FACTS)
        answer, garbage = ANSWER.format(animal, sound, home), rng.random() < wrong
        if garbage:
            answer = " " + " ".join(rng.choices(WORDS, k=6))
        question = rng.choice(QUESTIONS).format(animal)
        found.append({"id": i, "prompt": question, "completion": answer, "garbage": garbage})
    return found


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are words."""
    text = " ".join((*QUESTIONS, ANSWER, *WORDS))
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
    rows = questions(240, wrong=0.1, seed=0)
    data = Dataset.from_list(rows)
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, per_device_train_batch_size=options.batch_size, max_steps=options.steps,
            learning_rate=3e-3, logging_steps=max(options.steps // 10, 1), report_to="none",
            save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False,
            disable_tqdm=True,
        )  # fmt: skip
        common = {"args": args, "train_dataset": data, "processing_class": tokenizer}
        ledger = microclip.Ledger(f"{folder}/ledger")
        if options.plain:
            trainer = SFTTrainer(model, **common)
        elif options.microbatch_size is not None:
            trainer = ClippedSFTTrainer(
                model, **common, microbatch_size=options.microbatch_size, id_column="id"
            )
        else:
            # The only change. Every text's loss is remembered, and those that stay bad while the
            # others are learned lose their weight.
            trainer = ClippedSFTTrainer(
                model, **common, rule=microclip.rules.LossHistory(), id_column="id", ledger=ledger
            )
        trainer.train()
        if not options.plain and options.microbatch_size is None:
            report(microclip.find_issues(ledger), {r["id"] for r in rows if r["garbage"]}, rows)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    # does it know the answers? only clean ones count
    clean = questions(100, wrong=0.0, seed=1)
    right = 0
    for row in clean:
        question = len(tokenizer(row["prompt"]).input_ids)
        tokens = tokenizer(row["prompt"] + row["completion"], return_tensors="pt").input_ids
        with torch.no_grad():
            best = model.eval()(tokens).logits[0, question - 1 : -1].argmax(-1)
        right += bool((best == tokens[0, question:]).all())
    print(f"accuracy of whole answers: {right / len(clean):.1%}")
    return [float(loss) for loss in losses]


def report(found: Issues, garbage: set[object], rows: list[dict[str, object]]) -> None:
    """Print what was flagged, and how much of it is really garbage."""
    flagged = set(found.ids())
    hits = len(flagged & garbage)
    print(found)
    for name in found.ids()[:3]:
        print(f"  {name}: {rows[name]['prompt']}{rows[name]['completion']}")
    print(f"precision {hits / max(1, len(flagged)):.1%}, recall {hits / max(1, len(garbage)):.1%}")


if __name__ == "__main__":
    main()
