"""Train a small language model with transformers on texts, a fifth of them gibberish.

python examples/causal_lm.py                              # clipped, micro-batches of 4
python examples/causal_lm.py --plain                      # the stock Trainer, for comparison

The texts are docstrings of Python's standard library, one token per character. In a fifth of them
the characters are shuffled.
"""

import argparse
import importlib
import random
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from microclip.integrations.transformers import ClippedTrainer

MODULES = (
    "argparse collections contextlib dataclasses decimal email functools heapq http inspect io"
)
MODULES += " itertools json logging math os pathlib pickle random re string tempfile threading"
LENGTH = 48  # characters per text


def texts(shuffled: float, seed: int) -> list[str]:
    """Return pieces of docstrings, a fraction of which have their characters shuffled."""
    rng = random.Random(seed)
    found = []
    for name in MODULES.split():
        module = importlib.import_module(name)
        for member in [module, *[value for _, value in sorted(vars(module).items())]]:
            doc = getattr(member, "__doc__", None)
            text = " ".join(doc.split()) if isinstance(doc, str) else ""
            text = text.encode("ascii", "ignore").decode()
            found += [text[i : i + LENGTH] for i in range(0, len(text) - LENGTH, LENGTH)]
    rng.shuffle(found)
    return [
        "".join(rng.sample(text, len(text))) if rng.random() < shuffled else text for text in found
    ]


def as_tokens(text: str) -> dict[str, torch.Tensor]:
    """Return a text with one token per character; the model shifts the labels itself."""
    tokens = torch.tensor([ord(character) for character in text])
    return {"input_ids": tokens, "labels": tokens}


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, print the bits per character on readable texts, and return the logged losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plain", action="store_true", help="train without microclip")
    parser.add_argument("--microbatch-size", type=int, default=4, help="texts clipped together")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(arguments)

    set_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    found = texts(shuffled=0.2, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=options.batch_size, max_steps=options.steps,
            learning_rate=3e-3, logging_steps=max(options.steps // 10, 1), report_to="none",
            save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        data = [as_tokens(text) for text in found[200:]]
        if options.plain:
            trainer = Trainer(model, args, train_dataset=data)
        else:
            # The only change. Micro-batches with gibberish in them can no longer outweigh the
            # others: all gradients are rescaled to the smallest norm among them.
            trainer = ClippedTrainer(
                model, args, train_dataset=data, microbatch_size=options.microbatch_size
            )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    # the same seed gives the same order, so these are the first 200 texts, which we held out
    clean = [as_tokens(text) for text in texts(shuffled=0.0, seed=0)[:200]]
    batch = {key: torch.stack([row[key] for row in clean]) for key in clean[0]}
    with torch.no_grad():
        loss = model.eval()(**batch).loss
    print(f"held-out readable texts: {loss / 0.6931:.2f} bits per character")
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    main()
