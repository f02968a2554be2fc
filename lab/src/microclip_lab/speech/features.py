"""Audio and features: 16 kHz mono sound, stacked log-mel frames, and SpecAugment.

The features equal those of SeamlessM4TFeatureExtractor, which goes with Wav2Vec2-BERT; that one
loops over frames in Python, while this one takes a tenth of the time. Masking is done here, because
the model draws masks from numpy's global generator: they would differ between processes, and
between the two passes of an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from microclip_lab.training.batch_rng import Array, BatchRng
from microclip_lab.training.config import LayoutError

SAMPLING_RATE = 16_000

Sound = npt.NDArray[np.float32]


def resampled(sound: npt.NDArray[Any], rate: int) -> Sound:
    """Return a sound resampled to 16 kHz."""
    if rate == SAMPLING_RATE:
        return sound.astype(np.float32)
    from scipy.signal import resample_poly  # type: ignore[import-untyped]

    shared = int(np.gcd(rate, SAMPLING_RATE))
    made: Sound = resample_poly(sound, SAMPLING_RATE // shared, rate // shared)
    return np.clip(made, -1, 1).astype(np.float32)


def resampled_length(samples: int, rate: int) -> int:
    """Return the number of samples after resampling to 16 kHz."""
    return -(-samples * SAMPLING_RATE // rate)


def read(path: Path) -> Sound:
    """Return the sound of a file (FLAC, WAV, ...), with channels averaged."""
    import soundfile  # type: ignore[import-untyped]

    try:
        sound, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise LayoutError(
            f"{path} is damaged and cannot be decoded ({error}) Copy it again from where the data "
            "came from, or delete it and its line in the transcript."
        ) from error
    return resampled(sound.mean(1), rate)


def with_noise(sound: Sound, decibels: float, draw: np.random.Generator) -> Sound:
    """Return the sound with noise this many dB below it, of a random color."""
    spectrum = np.fft.rfft(draw.standard_normal(len(sound)))
    # power falls as 1/f^color: 0 is white, 1 pink, 2 brown; bounded at low frequencies
    colour = draw.uniform(0, 2)
    spectrum /= np.maximum(np.fft.rfftfreq(len(sound)), 0.005) ** (colour / 2)
    noise = np.fft.irfft(spectrum, len(sound))
    wanted = _level(sound) * 10 ** (-decibels / 20)
    mixed = sound + noise * (wanted / max(_level(noise), 1e-12))
    return (mixed / max(1.0, float(np.abs(mixed).max()))).astype(np.float32)


def _level(sound: npt.NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(sound))))


WINDOW, HOP, FFT = 400, 160, 512  # samples: 25 ms every 10 ms
PREEMPHASIS = 0.97
MEL_FLOOR = 1.192092955078125e-07

Frames = npt.NDArray[np.float32]


def make_extractor(mels: int, stack: int) -> Any:
    """Return an extractor with this many mel bands and stacked frames."""
    from transformers import SeamlessM4TFeatureExtractor

    return SeamlessM4TFeatureExtractor(  # type: ignore[no-untyped-call]
        feature_size=mels, num_mel_bins=mels, stride=stack, sampling_rate=SAMPLING_RATE
    )


def frame_count(samples: int, stack: int) -> int:
    """Return the number of stacked frames of a sound."""
    return max(1, (1 + (samples - WINDOW) // HOP) // stack)


def extract(sound: npt.NDArray[Any], extractor: Any) -> Frames:
    """Return the frames of one sound, (time, stack, bands), as the extractor would."""
    shortest = WINDOW + (extractor.stride - 1) * HOP
    if len(sound) < shortest:  # anything shorter than a frame gives one frame
        sound = np.pad(sound, (0, shortest - len(sound)))
    frames = np.lib.stride_tricks.sliding_window_view(sound * np.float32(2**15), WINDOW)[::HOP]
    frames = frames - frames.mean(1, keepdims=True)
    frames[:, 1:] -= PREEMPHASIS * frames[:, :-1]
    frames[:, 0] *= 1 - PREEMPHASIS
    power = np.abs(np.fft.rfft(frames * extractor.window, FFT)) ** 2
    mels = np.log(np.maximum(MEL_FLOOR, power @ extractor.mel_filters))
    if len(mels) > 1:  # a single frame has no deviation
        mels = (mels - mels.mean(0)) / np.sqrt(mels.var(0, ddof=1) + 1e-7)
    # the extractor pads and masks the last frame; here it is dropped
    whole = len(mels) // extractor.stride
    stacked: Frames = (
        mels[: whole * extractor.stride].reshape(whole, extractor.stride, -1).astype(np.float32)
    )
    return stacked


LARGEST_PART = 0.2  # of an utterance that one mask may hide, so that short ones stay intelligible


def masked(
    utterances: Sequence[Frames],
    *,
    time_masks: int,
    longest: int,
    band_masks: int,
    widest: int,
    rng: BatchRng,
) -> list[Frames]:
    """Return the utterances with random stretches and bands set to zero, their mean.

    Args:
        utterances: (time, stack, bands) each.
        time_masks: Time masks per utterance.
        longest: Longest time mask in frames.
        band_masks: Frequency masks per utterance.
        widest: Widest frequency mask in mel bands.
        rng: Source of random numbers.
    """
    times, bands = rng.random(time_masks, 2), rng.random(band_masks, 2)
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
    """Return spans of length 0 to `limit` within `whole`, from pairs of uniform numbers."""
    spans = []
    for width_number, start_number in numbers:
        width = min(whole, int(width_number * (limit + 1)))
        start = int(start_number * (whole - width + 1))
        spans.append((start, start + width))
    return spans
