"""A tone, and chapters of it in LibriSpeech's layout."""

import numpy as np
import soundfile

from microclip_lab.speech.features import SAMPLING_RATE


def tone(seconds=0.5, rate=SAMPLING_RATE, pitch=440.0):
    return (0.5 * np.sin(2 * np.pi * pitch * np.arange(round(seconds * rate)) / rate)).astype("f4")


def chapter(root, split, speaker="84", name="121123", texts=("GO DO", "IT'S"), **audio):
    """Write a chapter in LibriSpeech's layout."""
    folder = root / split / speaker / name
    folder.mkdir(parents=True)
    lines = []
    for number, text in enumerate(texts):
        own = f"{speaker}-{name}-{number:04d}"
        lines.append(f"{own} {text}\n")
        rate, ending = audio.get("rate", SAMPLING_RATE), audio.get("ending", "flac")
        soundfile.write(folder / f"{own}.{ending}", tone(1 + number / 4, rate), rate)
    (folder / f"{speaker}-{name}.trans.txt").write_text("".join(lines))
    return folder
