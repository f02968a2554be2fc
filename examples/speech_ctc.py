"""Train a speech recogniser (CTC) with Lightning, on tones of which some have a wrong transcript.

python examples/speech_ctc.py                             # clipped, micro-batches of 4
python examples/speech_ctc.py --plain                     # the ordinary Trainer, for comparison

"Words" are sequences of tones in noise, as frames of a filter bank; a fifth of the transcripts
belongs to something else. Lightning's loader gives micro-batches, and `accumulate_grad_batches`
of them make a step.
"""

import argparse
import logging
import warnings

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import Wav2Vec2BertConfig, Wav2Vec2BertForCTC

from microclip.integrations.lightning import MicrobatchClip

SYMBOLS, FRAMES, BANDS, HELD = 5, 24, 16, 4


def tones(count: int, wrong: float, seed: int) -> TensorDataset:
    """Return recordings with their transcripts, some of them wrong."""
    generator = torch.Generator().manual_seed(seed)
    said = torch.randint(1, SYMBOLS + 1, (count, FRAMES // (HELD + 2)), generator=generator)
    frames = 0.5 * torch.randn(count, FRAMES, BANDS, generator=generator)
    for place in range(said.shape[1]):
        start = place * (HELD + 2)
        for held in range(HELD):
            frames[torch.arange(count), start + held, 3 * said[:, place] - 1] += 3.0
    other = torch.randint(1, SYMBOLS + 1, said.shape, generator=generator)
    mistaken = torch.rand(count, 1, generator=generator) < wrong
    return TensorDataset(frames, torch.where(mistaken, other, said))


class Recogniser(pl.LightningModule):
    """A Conformer that spells."""

    def __init__(self) -> None:
        super().__init__()
        config = Wav2Vec2BertConfig(
            vocab_size=SYMBOLS + 1, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=64, feature_projection_input_dim=BANDS, pad_token_id=0,
            conv_depthwise_kernel_size=5, ctc_loss_reduction="mean", apply_spec_augment=False,
            layerdrop=0.0,
        )  # fmt: skip
        self.net = Wav2Vec2BertForCTC(config)
        self.losses: list[float] = []

    def training_step(
        self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int
    ) -> torch.Tensor:
        """Return the loss of a batch."""
        frames, transcripts = batch
        loss = self.net(frames, labels=transcripts).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what changes the weights."""
        return torch.optim.AdamW(self.parameters(), lr=4e-3)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, say how it went, and return the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plain", action="store_true", help="train without microclip")
    parser.add_argument(
        "--microbatch-size", type=int, default=4, help="recordings clipped together"
    )
    parser.add_argument("--microbatches", type=int, default=4, help="micro-batches in a step")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args(arguments)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
    pl.seed_everything(0, verbose=False)
    model = Recogniser()
    loader = DataLoader(tones(800, 0.2, seed=0), options.microbatch_size, shuffle=True)
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        accumulate_grad_batches=options.microbatches,
        callbacks=[] if options.plain else [MicrobatchClip()],
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)

    frames, said = tones(200, 0.0, seed=1).tensors
    with torch.no_grad():
        best = model.net.eval()(frames).logits.argmax(-1)
    right = [spelt(row) == word for row, word in zip(best.tolist(), said.tolist(), strict=True)]
    print(f"of new recordings {sum(right) / len(right):.1%} are spelt without a mistake")
    return model.losses


def spelt(symbols: list[int]) -> list[int]:
    """Return what a path through the frames spells: repetitions once, blanks not at all."""
    pairs = zip(symbols, [0, *symbols], strict=False)
    return [symbol for symbol, before in pairs if symbol not in (0, before)]


if __name__ == "__main__":
    main()
