"""Fine-tune a text classifier with transformers, on sentences of which a fifth has a wrong label.

python examples/text_classifier.py                        # clipped, micro-batches of 4
python examples/text_classifier.py --plain                # the ordinary Trainer, for comparison

For your own: `AutoModelForSequenceClassification.from_pretrained(...)`, your tokenizer, your data
set; the line that changes stays the same.
"""

import argparse
import random
import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

from microclip.integrations.transformers import ClippedTrainer

GOOD = "a delight, moving, warm and funny, brilliant acting, worth every minute, I loved it"
BAD = "a bore, dull, cold and clumsy, wooden acting, a waste of time, I hated it"
FILLER = "the film was, the second half is, my neighbour says it is, all in all it is, they call it"
WORDS = sorted(set(f"{GOOD} {BAD} {FILLER}".replace(",", "").split()))
LENGTH = 12


def sentences(count: int, wrong: float, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return so many sentences, as tokens with a label, some of the labels wrong."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        label = draw.randrange(2)
        said = draw.choice((GOOD if label else BAD).split(", "))
        words = f"{draw.choice(FILLER.split(', '))} {said}".split()
        tokens = [1 + WORDS.index(word) for word in words][:LENGTH]
        padded = torch.tensor(tokens + [0] * (LENGTH - len(tokens)))
        label = 1 - label if draw.random() < wrong else label
        row = {"input_ids": padded, "attention_mask": (padded > 0).long()}
        found.append({**row, "labels": torch.tensor(label)})
    return found


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, say how it went, and return the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plain", action="store_true", help="train without microclip")
    parser.add_argument("--microbatch-size", type=int, default=4, help="examples clipped together")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args(arguments)

    set_seed(0)
    config = BertConfig(
        vocab_size=1 + len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=LENGTH, num_labels=2,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    data = sentences(1000, wrong=0.2, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=options.batch_size, max_steps=options.steps,
            learning_rate=1e-3, logging_steps=max(options.steps // 10, 1), report_to="none",
            save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        if options.plain:
            trainer = Trainer(model, args, train_dataset=data)
        else:
            trainer = ClippedTrainer(
                model, args, train_dataset=data, microbatch_size=options.microbatch_size
            )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    clean = sentences(500, wrong=0.0, seed=1)
    batch = {key: torch.stack([row[key] for row in clean]) for key in clean[0]}
    with torch.no_grad():
        right = model.eval()(**batch).logits.argmax(1) == batch["labels"]
    print(f"on clean sentences {right.float().mean():.1%} are right")
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    main()
