"""Train a vision transformer with Accelerate on digits, a fifth of them mislabeled.

python examples/image_classifier.py                       # clipped, micro-batches of 4
python examples/image_classifier.py --plain               # the ordinary loop, for comparison
torchrun --nproc-per-node 2 examples/image_classifier.py  # on two ranks
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

from microclip.integrations.accelerate import AcceleratedClipper


def digits(wrong: float) -> tuple[TensorDataset, TensorDataset]:
    """Return training images, a fraction of which are mislabeled, and clean test images."""
    found = load_digits()
    pixels = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(found.target)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=generator)
    train, test = order[:1300], order[1300:]
    noisy = labels[train]
    mislabeled = torch.rand(len(train), generator=generator) < wrong
    # an offset of 1 to 9 never gives the right digit by chance
    offset = torch.randint(1, 10, (len(train),), generator=generator)
    noisy = torch.where(mislabeled, (noisy + offset) % 10, noisy)
    return TensorDataset(pixels[train], noisy), TensorDataset(pixels[test], labels[test])


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, print the accuracy on clean data, and return the loss of every step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plain", action="store_true", help="train without microclip")
    parser.add_argument("--microbatch-size", type=int, default=4, help="images clipped together")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args(arguments)

    set_seed(0)
    accelerator = Accelerator(cpu=True)
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=64, num_labels=10,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train, test = digits(wrong=0.2)
    loader = DataLoader(train, options.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def loss_fn(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        pixels, labels = batch
        # one loss per example, not the mean: the clipper then needs a single pass only
        return F.cross_entropy(model(pixels).logits, labels, reduction="none")

    # after prepare(): the clipper must see the model that DDP has wrapped
    clipper = AcceleratedClipper(accelerator, model, options.microbatch_size)
    losses = []
    for _ in range(options.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                if options.plain:
                    loss = loss_fn(batch).mean()
                    accelerator.backward(loss)
                else:
                    loss = clipper.backward(loss_fn, batch).loss
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()

    pixels, labels = test.tensors
    with torch.no_grad():
        correct = model.eval()(pixels).logits.argmax(1) == labels
    accelerator.print(f"accuracy on clean digits: {correct.float().mean():.1%}")
    return losses


if __name__ == "__main__":
    main()
