"""Audio of the speech recipe: espeak-ng, noise, resampling, features."""

from dataclasses import replace

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from microclip_lab.speech import librispeech, synthesis
from microclip_lab.speech.features import (
    SAMPLING_RATE,
    extract,
    frame_count,
    make_extractor,
    read,
    resampled,
    with_noise,
)
from microclip_lab.speech.synthesis import SpeakingError, Utterance, speak
from microclip_lab.training.fetch import cache_folder

from librispeech_chapters import tone

LINE = Utterance("seven up", "f3", "en-us", 170, 50)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


class TestSpeaking:
    def test_is_the_same_every_time_and_whatever_was_said_elsewhere(self):
        lines = [LINE, replace(LINE, text="stop", speaker="klatt4"), LINE]
        speak([replace(LINE, speaker="m2")])
        for once, again in zip(speak(lines), speak(lines), strict=True):
            assert np.array_equal(once, again)

    def test_is_shorter_when_faster(self):
        normal, fast = speak([LINE, replace(LINE, rate=4 * LINE.rate)])
        assert 0.3 < len(normal) / SAMPLING_RATE < 3
        assert 2.5 < len(normal) / len(fast) < 6

    def test_speakers_differ(self):
        one, other = speak([LINE, replace(LINE, speaker="m3")])
        assert len(one) != len(other) or not np.array_equal(one, other)

    def test_all_speakers_and_accents_are_there(self):
        lines = [replace(LINE, text="go", speaker=speaker) for speaker in synthesis.SPEAKERS]
        lines += [replace(LINE, text="go", accent=accent) for accent in synthesis.ACCENTS]
        assert all(np.abs(sound).max() > 0.01 for sound in speak(lines))

    @pytest.mark.parametrize("wrong", [{"speaker": "nobody"}, {"accent": "nowhere"}])
    def test_who_is_not_there_is_named(self, wrong):
        with pytest.raises(SpeakingError, match=f"has no .*{next(iter(wrong.values()))}"):
            speak([replace(LINE, **wrong)])


class TestScript:
    @given(st.integers(0, 1000))
    def test_nobody_speaks_in_two_parts(self, seed):
        cast = synthesis.cast(seed)
        assert len({*cast.training, *cast.validation, *cast.test}) == len(synthesis.SPEAKERS)
        assert len(cast.validation) == len(cast.test) == synthesis.HELD_BACK
        assert set(cast.training).isdisjoint(cast.validation)
        assert set(cast.training).isdisjoint(cast.test)

    def test_depends_on_the_seed_alone(self):
        assert synthesis.corpus(3, 20, 5) == synthesis.corpus(3, 20, 5)
        assert synthesis.corpus(3, 20, 5) != synthesis.corpus(4, 20, 5)

    def test_more_utterances_are_the_same_and_more(self):
        few, many = synthesis.corpus(0, 5, 3), synthesis.corpus(0, 9, 3)
        assert many["train-espeak"][:5] == few["train-espeak"]
        assert many["test-espeak"] == few["test-espeak"]


class TestSound:
    def test_resampling_keeps_the_pitch(self):
        for rate in (8000, 22050, 44100):
            sound = resampled(tone(1.0, rate), rate)
            assert abs(len(sound) - SAMPLING_RATE) <= 1
            assert np.abs(np.fft.rfft(sound)).argmax() == pytest.approx(440, abs=1)

    def test_noise_is_as_far_below_as_was_said(self):
        sound = 0.1 * tone(2.0)
        noise = with_noise(sound, 20.0, np.random.default_rng(0)) - sound
        assert np.mean(sound**2) / np.mean(noise**2) == pytest.approx(100, rel=1e-3)

    def test_noise_never_goes_beyond_the_scale(self):
        assert np.abs(with_noise(tone(), -10.0, np.random.default_rng(0))).max() <= 1

    def test_two_channels_become_one(self, tmp_path):
        both = np.stack([tone(), -tone()], 1)
        soundfile.write(tmp_path / "a.wav", both, SAMPLING_RATE)
        assert np.abs(read(tmp_path / "a.wav")).max() < 1e-4


class TestFeatures:
    @pytest.mark.parametrize("samples", [880, 8000, 8159, 8160, 8300, 8320, 16001])
    @pytest.mark.parametrize(("mels", "stack"), [(80, 2), (40, 2), (40, 4)])
    def test_are_the_extractors(self, samples, mels, stack):
        sound = np.random.default_rng(samples).standard_normal(samples).astype("f4") / 10
        extractor = make_extractor(mels, stack)
        theirs = extractor(sound, sampling_rate=SAMPLING_RATE, pad_to_multiple_of=None)
        ours = extract(sound, extractor)
        assert len(ours) == frame_count(samples, stack)
        np.testing.assert_allclose(
            ours.reshape(len(ours), mels * stack),
            np.asarray(theirs["input_features"][0])[: len(ours)],
            atol=1e-4,
        )

    @pytest.mark.parametrize("stack", [1, 4])
    @pytest.mark.parametrize("samples", [1, 399, 400, 559])
    def test_of_next_to_nothing_are_one_finite_frame(self, samples, stack):
        frames = extract(tone()[:samples], make_extractor(40, stack))
        assert frames.shape == (1, stack, 40) == (frame_count(samples, stack), stack, 40)
        assert np.isfinite(frames).all()


class TestStudio:
    def test_records_once(self, monkeypatch):
        lines = {"train-espeak": [LINE, LINE], "dev-espeak": [LINE]}
        folder = synthesis.recorded(lines, (20, 20), 0)
        found = librispeech.in_split(folder / "train-espeak")
        assert [one.name for one in found] == ["f3-0-00000", "f3-0-00001"]
        assert [one.text for one in found] == ["seven up", "seven up"]
        sounds = [read(one.path) for one in found]
        assert len(sounds[0]) == found[0].samples
        assert not np.array_equal(sounds[0], sounds[1][: len(sounds[0])])  # each has its own noise

        def silence(lines):
            raise AssertionError("It was recorded a second time.")

        monkeypatch.setattr(synthesis, "speak", silence)
        assert synthesis.recorded(lines, (20, 20), 0) == folder
        with pytest.raises(AssertionError):
            synthesis.recorded(lines, (10, 20), 0)

    def test_leaves_nothing_half_done(self):
        folder = cache_folder() / "speech"
        folder.mkdir(parents=True, exist_ok=True)
        before = sorted(folder.iterdir())
        with pytest.raises(SpeakingError):
            synthesis.recorded({"a": [LINE], "b": [replace(LINE, speaker="nobody")]}, (20, 20), 0)
        assert sorted(folder.iterdir()) == before

    def test_another_process_may_be_faster(self, monkeypatch):
        lines = {"train-espeak": [replace(LINE, text="one two")]}
        really, made = synthesis.speak, []

        def meanwhile(block):
            if not made:
                made.append(None)
                made.append(synthesis.recorded(lines, (20, 20), 0))
            return really(block)

        monkeypatch.setattr(synthesis, "speak", meanwhile)
        assert synthesis.recorded(lines, (20, 20), 0) == made[1]
        assert not list((cache_folder() / "speech").glob(".recording-*"))

    def test_how_lines_are_cut_into_blocks_is_fixed(self, monkeypatch, tmp_path):
        sounds = []
        for place, cores in enumerate((1, 4)):
            monkeypatch.setattr(synthesis, "BLOCK", 2)
            monkeypatch.setattr(synthesis.os, "cpu_count", lambda cores=cores: cores)
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(place)))
            lines = [replace(LINE, speaker=speaker) for speaker in synthesis.SPEAKERS[:5]]
            folder = synthesis.recorded({"train": lines}, (10, 20), 0)
            files = sorted(folder.rglob("*.flac"))
            assert len(files) == 5
            sounds.append([file.read_bytes() for file in files])
        assert sounds[0] == sounds[1]
