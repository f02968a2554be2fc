"""A separate program: speaks the lines on its standard input, writes audio to standard output.

espeak-ng keeps global state, so earlier speech changes later speech; in a fresh process the same
lines always give the same audio. This is also the only place where the library (GPL-3) is loaded.
Imports nothing of microclip, so that it starts quickly.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from pathlib import Path
from typing import Any

SYNCHRONOUS = 2  # AUDIO_OUTPUT_SYNCHRONOUS: the callback has been given all sound on return
DO_NOT_EXIT = 0x8000  # report errors instead of ending the process
RATE, PITCH = 1, 3  # parameters
CHARACTERS = 1  # the text's position is counted in characters
UTF8 = 1
CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


def main() -> None:
    """Speak each line of a JSON list; write the rate, then each line's length and samples."""
    import espeakng_loader  # type: ignore[import-untyped]

    library = ctypes.CDLL(espeakng_loader.get_library_path())
    library.espeak_Synth.argtypes = [
        ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_int,
        ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p,
    ]  # fmt: skip
    data = Path(espeakng_loader.get_data_path())
    variants = data / "voices" / "!v"
    rate = library.espeak_Initialize(SYNCHRONOUS, 0, str(data).encode(), DO_NOT_EXIT)
    if rate <= 0:
        sys.exit(f"espeak-ng could not be started with its data in {data}.")
    heard: list[bytes] = []

    def listen(samples: Any, count: int, events: Any) -> int:
        if count > 0:
            heard.append(ctypes.string_at(samples, 2 * count))
        return 0

    callback = CALLBACK(listen)  # keep a reference while the library uses it
    library.espeak_SetSynthCallback(callback)
    out = sys.stdout.buffer
    out.write(struct.pack("<i", rate))
    for line in json.load(sys.stdin):
        heard.clear()
        library.espeak_ng_SetRandSeed(ctypes.c_long(0))  # it would use the clock otherwise
        # for an unknown variant, the library would silently use its default voice
        if not (variants / line["speaker"]).is_file():
            sys.exit(f"espeak-ng has no speaker {line['speaker']!r} in {variants}.")
        if library.espeak_SetVoiceByName(f"{line['accent']}+{line['speaker']}".encode()) != 0:
            sys.exit(f"espeak-ng has no accent {line['accent']!r}.")
        library.espeak_SetParameter(RATE, line["rate"], 0)
        library.espeak_SetParameter(PITCH, line["pitch"], 0)
        text = line["text"].encode()
        if library.espeak_Synth(text, len(text) + 1, 0, CHARACTERS, 0, UTF8, None, None) != 0:
            sys.exit(f"espeak-ng could not speak {line['text']!r}.")
        sound = b"".join(heard)
        out.write(struct.pack("<i", len(sound) // 2))
        out.write(sound)


if __name__ == "__main__":
    main()
