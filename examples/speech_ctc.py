"""Train a speech recognizer (CTC) with Lightning on tones, a fifth with a wrong transcript.

python examples/speech_ctc.py                             # clipped, micro-batches of 4
python examples/speech_ctc.py --plain                     # the stock Trainer, for comparison

A "word" is a sequence of tones in noise, given as frames of a filter bank. The loader yields
micro-batches, and `accumulate_grad_batches` of them make a step. If your loader yields larger
batches, MicrobatchClip(microbatch_size=4) cuts them for you.
"""

import argparse
import logging
import warnings

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import Wav2Vec2BertConfig, Wav2Vec2BertForCTC

from microclip.integrations.lightning import MicrobatchClip

SYMBOLS, FRAMES, BANDS = 5, 24, 16
TONE, PAUSE = 4, 2  # frames per symbol: a tone, then silence


def tones(count: int, wrong: float, seed: int) -> TensorDataset:
    """Return recordings with their transcripts, a fraction of which are wrong."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, SYMBOLS + 1, (count, FRAMES // (TONE + PAUSE)), generator=generator)
    frames = 0.5 * torch.randn(count, FRAMES, BANDS, generator=generator)
    for place in range(words.shape[1]):
        start = place * (TONE + PAUSE)
        for frame in range(start, start + TONE):
            frames[torch.arange(count), frame, 3 * words[:, place] - 1] += 3.0
    others = torch.randint(1, SYMBOLS + 1, words.shape, generator=generator)
    mistaken = torch.rand(count, 1, generator=generator) < wrong
    return TensorDataset(frames, torch.where(mistaken, others, words))


class Recognizer(pl.LightningModule):
    """A small Conformer with a CTC head; nothing in it knows about clipping."""

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
        """Return the mean loss of a batch."""
        frames, transcripts = batch
        loss = self.net(frames, labels=transcripts).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=4e-3)


def decode(symbols: list[int]) -> list[int]:
    """Return the word that a path of symbols spells: repeats collapse, blanks (0) disappear."""
    pairs = zip(symbols, [0, *symbols], strict=False)
    return [symbol for symbol, before in pairs if symbol not in (0, before)]


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, print the accuracy on clean data, and return the loss of every micro-batch."""
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

    # Lightning's advice about workers and GPUs does not apply to a one-minute example
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
    pl.seed_everything(0, verbose=False)
    model = Recognizer()
    loader = DataLoader(tones(800, 0.2, seed=0), options.microbatch_size, shuffle=True)
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        accumulate_grad_batches=options.microbatches,
        callbacks=[] if options.plain else [MicrobatchClip()],
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)

    frames, words = tones(200, 0.0, seed=1).tensors
    with torch.no_grad():
        best = model.net.eval()(frames).logits.argmax(-1)
    correct = [decode(row) == word for row, word in zip(best.tolist(), words.tolist(), strict=True)]
    print(f"new recordings transcribed without a mistake: {sum(correct) / len(correct):.1%}")
    return model.losses


if __name__ == "__main__":
    main()
