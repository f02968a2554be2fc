"""Sound as numbers: 16 kHz, one channel, from -1 to 1; and noise to add to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SAMPLING_RATE = 16_000

Sound = npt.NDArray[np.float32]


def resampled(sound: npt.NDArray[Any], rate: int) -> Sound:
    """Return a sound of any rate at 16 kHz."""
    if rate == SAMPLING_RATE:
        return sound.astype(np.float32)
    from scipy.signal import resample_poly  # type: ignore[import-untyped]

    shared = int(np.gcd(rate, SAMPLING_RATE))
    made: Sound = resample_poly(sound, SAMPLING_RATE // shared, rate // shared)
    return np.clip(made, -1, 1).astype(np.float32)


def resampled_length(samples: int, rate: int) -> int:
    """Return how many samples a sound has after being brought to 16 kHz."""
    return -(-samples * SAMPLING_RATE // rate)


def read(path: Path) -> Sound:
    """Return the sound of a file: FLAC, WAV or whatever soundfile knows; channels are averaged."""
    import soundfile  # type: ignore[import-untyped]

    sound, rate = soundfile.read(path, dtype="float32", always_2d=True)
    return resampled(sound.mean(1), rate)


def with_noise(sound: Sound, decibels: float, draw: np.random.Generator) -> Sound:
    """Return the sound with noise so many decibels below it, of a colour that is drawn."""
    spectrum = np.fft.rfft(draw.standard_normal(len(sound)))
    # power falls as 1/f^colour: 0 is white, 1 pink, 2 brown; the lowest do not grow endlessly
    colour = draw.uniform(0, 2)
    spectrum /= np.maximum(np.fft.rfftfreq(len(sound)), 0.005) ** (colour / 2)
    noise = np.fft.irfft(spectrum, len(sound))
    wanted = _level(sound) * 10 ** (-decibels / 20)
    mixed = sound + noise * (wanted / max(_level(noise), 1e-12))
    return (mixed / max(1.0, float(np.abs(mixed).max()))).astype(np.float32)


def _level(sound: npt.NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(sound))))
