"""Any folder in LibriSpeech's layout. Files are listed at once, and decoded on demand.

A surprise is an error that says what was expected and what was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from microclip_lab.speech.features import resampled_length
from microclip_lab.speech.recordings import Recording
from microclip_lab.training.config import LayoutError

SPLITS = {"training": "train", "validation": "dev", "test": "test"}  # prefixes of their folders
LAYOUT = (
    "train*/, dev*/ and test*/, each with SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt and, beside "
    "it, SPEAKER-CHAPTER-0000.flac (or .wav) for every line"
)
ENDINGS = (".flac", ".wav")
NAMED = 5  # names that an error lists


def find(root: Path) -> dict[str, list[Recording]]:
    """Return the recordings of a folder's splits: "training", "validation" and "test"."""
    if not root.is_dir():
        raise LayoutError(
            f'data must be "espeak" or a folder with {LAYOUT}, but {root} is not one.'
        )
    parts = {}
    for part, beginning in SPLITS.items():
        folders = sorted(p for p in root.glob(f"{beginning}*") if p.is_dir())
        if not folders:
            raise LayoutError(
                f"{root} was expected to have {LAYOUT}, but there is no folder whose name begins "
                f"with {beginning}: it has {_content(root)}.{_perhaps_deeper(root)}"
            )
        parts[part] = [recording for folder in folders for recording in in_split(folder)]
    return parts


def in_split(folder: Path) -> list[Recording]:
    """Return the recordings of one split."""
    transcripts = sorted(folder.glob("*/*/*.trans.txt"))
    if not transcripts:
        elsewhere = next(folder.rglob("*.trans.txt"), None)
        found = _content(folder) if elsewhere is None else f"{elsewhere.relative_to(folder)}"
        raise LayoutError(
            f"{folder} was expected to have SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt, but has "
            f"{found}."
        )
    found_names: dict[str, Recording] = {}
    for path in transcripts:
        for recording in _of_chapter(path, folder.name):
            if recording.name in found_names:
                raise LayoutError(
                    f"{path} was expected to have unique names, but {recording.name} is also in "
                    f"{found_names[recording.name].path.parent}."
                )
            found_names[recording.name] = recording
    return list(found_names.values())


def _of_chapter(path: Path, kind: str) -> Iterator[Recording]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise LayoutError(
            f"{path} was expected to be text in UTF-8, but is not: {error}."
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name, _, text = line.strip().partition(" ")
        text = " ".join(text.lower().split())
        if not text:
            raise LayoutError(
                f"Line {number} of {path} was expected to have a name and a transcript, as in "
                f'"84-121123-0000 GO DO YOU HEAR", but is {line.strip()[:80]!r}: it has no words.'
            )
        audio = _audio(path.parent, name, f"line {number} of {path.name}")
        yield Recording(name, audio, text, _samples(audio), kind)


def _audio(folder: Path, name: str, asker: str) -> Path:
    if Path(name).name != name:
        raise LayoutError(
            f"{asker} in {folder} was expected to begin with a name, but begins with {name!r}."
        )
    for ending in ENDINGS:
        path = folder / f"{name}{ending}"
        if path.is_file():
            return path
    raise LayoutError(
        f"{folder} was expected to have {name}.flac or {name}.wav, named in {asker}, but has "
        f"{_content(folder)}."
    )


def _samples(path: Path) -> int:
    import soundfile  # type: ignore[import-untyped]

    try:
        said = soundfile.info(path)
    except soundfile.LibsndfileError as error:
        raise LayoutError(f"{path} was expected to be FLAC or WAV, but: {error}") from error
    if not said.frames:
        raise LayoutError(f"{path} was expected to have sound in it, but has none.")
    return resampled_length(said.frames, said.samplerate)


def _content(folder: Path) -> str:
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    if not names:
        return "nothing in it"
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _perhaps_deeper(root: Path) -> str:
    """Return a hint if the splits are one folder deeper, as the archives unpack them."""
    for folder in sorted(root.iterdir()):
        if folder.is_dir() and any(folder.glob("train*")):
            return f" Did you mean {folder}?"
    return ""
