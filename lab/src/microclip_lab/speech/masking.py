"""SpecAugment: stretches of time and bands of pitch that the model does not get to hear.

Done here and not by the model, whose own masks come from numpy's global generator: they would be
others on each process, and others again in the second of two passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from microclip_lab.speech.features import Frames
from microclip_lab.training.batch_rng import Array, Draws

LARGEST_PART = 0.2  # of an utterance that one mask may hide: short ones are to stay legible


def masked(
    utterances: Sequence[Frames],
    *,
    time_masks: int,
    longest: int,
    band_masks: int,
    widest: int,
    draws: Draws,
) -> list[Frames]:
    """Return the utterances with zeros, their mean, in some stretches and bands.

    Args:
        utterances: (time, stack, bands) each.
        time_masks: Stretches of each utterance.
        longest: Frames of a stretch at most.
        band_masks: Bands of each utterance.
        widest: Mel bands at most.
        draws: Of the mini-batch.
    """
    times, bands = draws.random(time_masks, 2), draws.random(band_masks, 2)
    found = []
    for frames, its_times, its_bands in zip(utterances, times, bands, strict=True):
        hidden = frames.copy()
        limit = min(longest, int(LARGEST_PART * len(frames)))
        for start, end in _spans(its_times, len(frames), limit):
            hidden[start:end] = 0
        for start, end in _spans(its_bands, hidden.shape[2], widest):
            hidden[:, :, start:end] = 0
        found.append(hidden)
    return found


def _spans(numbers: Array, whole: int, limit: int) -> list[tuple[int, int]]:
    """Return stretches of 0 to `limit` out of `whole`, from pairs of numbers between 0 and 1."""
    spans = []
    for width_number, start_number in numbers:
        width = min(whole, int(width_number * (limit + 1)))
        start = int(start_number * (whole - width + 1))
        spans.append((start, start + width))
    return spans
