"""Train a text classifier with a LoRA adapter on film reviews, a fifth of them mislabeled.

python examples/lora_classifier.py                        # wrong labels are found and held back
python examples/lora_classifier.py --microbatch-size 4    # clipped instead
python examples/lora_classifier.py --plain                # the stock Trainer

To use your own model and data, replace LlamaForSequenceClassification(config) with
AutoModelForSequenceClassification.from_pretrained(...) and the reviews with your data set. The
data set needs a column with ids; the line with ClippedTrainer stays the same.
"""

import argparse
import random
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

import microclip
from microclip.integrations.transformers import ClippedTrainer

GOOD = ("a delight", "moving", "warm and funny", "brilliant acting", "worth every minute")
BAD = ("a bore", "dull", "cold and clumsy", "wooden acting", "a waste of time")
FILLER = ("the film was", "the second half is", "my neighbour says it is", "all in all it is")
WORDS = sorted(set(" ".join((*GOOD, *BAD, *FILLER)).split()))
LENGTH = 10


def reviews(count: int, wrong: float, seed: int) -> list[dict[str, object]]:
    """Return tokenized reviews with labels, a fraction of which are wrong."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        label = rng.randrange(2)
        text = f"{rng.choice(FILLER)} {rng.choice(GOOD if label else BAD)}"
        tokens = [1 + WORDS.index(word) for word in text.split()]  # 0 is padding
        padded = torch.tensor(tokens + [0] * (LENGTH - len(tokens)))
        flipped = rng.random() < wrong
        row = {"input_ids": padded, "attention_mask": (padded > 0).long(), "id": i, "text": text}
        found.append({**row, "labels": 1 - label if flipped else label, "flipped": flipped})
    return found


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, print what was found and the accuracy on clean data, and return the logged losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plain", action="store_true", help="train without microclip")
    parser.add_argument("--microbatch-size", type=int, help="clip micro-batches instead")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args(arguments)

    set_seed(0)
    config = LlamaConfig(
        vocab_size=1 + len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=LENGTH, num_labels=2, pad_token_id=0,
        initializer_range=0.1,
    )  # fmt: skip
    # only the adapter and the classifier are trained, so only they have norms, and memory
    lora = LoraConfig(task_type="SEQ_CLS", r=8, target_modules="all-linear")
    model = get_peft_model(LlamaForSequenceClassification(config), lora)
    rows = reviews(320, wrong=0.2, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=options.batch_size, max_steps=options.steps,
            learning_rate=1e-2, logging_steps=max(options.steps // 10, 1), report_to="none",
            save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        ledger = microclip.Ledger(f"{folder}/ledger")
        if options.plain:
            trainer = Trainer(model, args, train_dataset=rows)
        elif options.microbatch_size is not None:
            trainer = ClippedTrainer(
                model, args, train_dataset=rows, microbatch_size=options.microbatch_size
            )
        else:
            # The only change. Every review's loss is remembered, and those that stay bad while the
            # others are learned lose their weight.
            trainer = ClippedTrainer(
                model, args, train_dataset=rows, rule=microclip.rules.LossHistory(), id_column="id",
                ledger=ledger,
            )  # fmt: skip
        trainer.train()
        if not options.plain and options.microbatch_size is None:
            found = microclip.find_issues(ledger)
            flagged, flipped = set(found.ids()), {row["id"] for row in rows if row["flipped"]}
            hits = len(flagged & flipped)
            print(found)
            for name in found.ids()[:3]:
                print(f"  {name}: {rows[name]['text']!r} is labeled {rows[name]['labels']}")
            print(f"precision {hits / max(1, len(flagged)):.1%}, recall {hits / len(flipped):.1%}")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    # evaluate on correct labels: the noisy ones would reward memorizing the noise
    clean = reviews(200, wrong=0.0, seed=1)
    batch = {
        key: torch.stack([row[key] for row in clean]) for key in ("input_ids", "attention_mask")
    }
    with torch.no_grad():
        best = model.eval()(**batch).logits.argmax(1)
    correct = best == torch.tensor([row["labels"] for row in clean])
    print(f"accuracy on clean reviews: {correct.float().mean():.1%}")
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    main()
