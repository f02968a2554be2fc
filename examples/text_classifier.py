"""Fine-tune a text classifier with transformers on sentences, a fifth of them mislabeled.

python examples/text_classifier.py                        # clipped, micro-batches of 4
python examples/text_classifier.py --plain                # the stock Trainer, for comparison

To use your own model and data, replace BertForSequenceClassification(config) with
AutoModelForSequenceClassification.from_pretrained(...) and the sentences with your data set. The
line with ClippedTrainer stays the same.
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

# film reviews, made of an opening and a verdict
GOOD = "a delight, moving, warm and funny, brilliant acting, worth every minute, I loved it"
BAD = "a bore, dull, cold and clumsy, wooden acting, a waste of time, I hated it"
FILLER = "the film was, the second half is, my neighbour says it is, all in all it is, they call it"
WORDS = sorted(set(f"{GOOD} {BAD} {FILLER}".replace(",", "").split()))
LENGTH = 12


def sentences(count: int, wrong: float, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return tokenized sentences with labels, a fraction of which are wrong."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        label = rng.randrange(2)
        verdict = rng.choice((GOOD if label else BAD).split(", "))
        words = f"{rng.choice(FILLER.split(', '))} {verdict}".split()
        tokens = [1 + WORDS.index(word) for word in words][:LENGTH]  # 0 is padding
        padded = torch.tensor(tokens + [0] * (LENGTH - len(tokens)))
        label = 1 - label if rng.random() < wrong else label
        row = {"input_ids": padded, "attention_mask": (padded > 0).long()}
        found.append({**row, "labels": torch.tensor(label)})
    return found


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, print the accuracy on clean data, and return the logged losses."""
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
            # The only change. Each batch of 32 becomes eight micro-batches of 4, and their
            # gradients are rescaled to the smallest norm, so a wrong label cannot shout.
            trainer = ClippedTrainer(
                model, args, train_dataset=data, microbatch_size=options.microbatch_size
            )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    # evaluate on correct labels: the noisy ones would reward memorizing the noise
    clean = sentences(500, wrong=0.0, seed=1)
    batch = {key: torch.stack([row[key] for row in clean]) for key in clean[0]}
    with torch.no_grad():
        correct = model.eval()(**batch).logits.argmax(1) == batch["labels"]
    print(f"accuracy on clean sentences: {correct.float().mean():.1%}")
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    main()
