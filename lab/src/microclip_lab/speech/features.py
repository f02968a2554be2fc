"""From sound to what the model hears: normalised log-mel frames, a few of them stacked.

The numbers are SeamlessM4TFeatureExtractor's, which goes with Wav2Vec2-BERT; it goes frame by frame
in Python, and this, all frames at once, takes a tenth of the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from microclip_lab.speech.sound import SAMPLING_RATE

WINDOW, HOP, FFT = 400, 160, 512  # samples: 25 ms every 10 ms
PREEMPHASIS = 0.97
MEL_FLOOR = 1.192092955078125e-07

Frames = npt.NDArray[np.float32]


def make_extractor(mels: int, stack: int) -> Any:
    """Return an extractor of so many mel bands, and so many frames of 10 ms in one."""
    from transformers import SeamlessM4TFeatureExtractor

    return SeamlessM4TFeatureExtractor(  # type: ignore[no-untyped-call]
        feature_size=mels, num_mel_bins=mels, stride=stack, sampling_rate=SAMPLING_RATE
    )


def frame_count(samples: int, stack: int) -> int:
    """Return how many stacked frames a sound of so many samples gives."""
    return max(1, (1 + (samples - WINDOW) // HOP) // stack)


def extract(sound: npt.NDArray[Any], extractor: Any) -> Frames:
    """Return the frames of one sound, (time, stack, bands), as the extractor would."""
    shortest = WINDOW + (extractor.stride - 1) * HOP
    if len(sound) < shortest:  # what is shorter than one frame is one frame, not none
        sound = np.pad(sound, (0, shortest - len(sound)))
    frames = np.lib.stride_tricks.sliding_window_view(sound * np.float32(2**15), WINDOW)[::HOP]
    frames = frames - frames.mean(1, keepdims=True)
    frames[:, 1:] -= PREEMPHASIS * frames[:, :-1]
    frames[:, 0] *= 1 - PREEMPHASIS
    power = np.abs(np.fft.rfft(frames * extractor.window, FFT)) ** 2
    mels = np.log(np.maximum(MEL_FLOOR, power @ extractor.mel_filters))
    if len(mels) > 1:  # one alone has no deviation
        mels = (mels - mels.mean(0)) / np.sqrt(mels.var(0, ddof=1) + 1e-7)
    # the extractor fills up the last frame with zeros and then masks it: it is left out here
    whole = len(mels) // extractor.stride
    stacked: Frames = (
        mels[: whole * extractor.stride].reshape(whole, extractor.stride, -1).astype(np.float32)
    )
    return stacked
