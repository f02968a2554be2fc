"""The speech recipe: folders, masks, losses and decoding."""

import logging
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from microclip_lab.speech import canaries, librispeech, synthesis
from microclip_lab.speech.features import SAMPLING_RATE, make_extractor, masked, read
from microclip_lab.speech.recipe import ESPEAK, Speech
from microclip_lab.speech.tokens import Tokens, error_rates, frames_needed, greedy
from microclip_lab.training.batch_rng import BatchRng
from microclip_lab.training.config import LayoutError, SettingError
from microclip_lab.training.train import train

from librispeech_chapters import chapter, tone

SMALL = Speech(utterances=40, judged_utterances=6, canaries=0.2, hidden_size=16, layers=1, heads=2)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def data(cache):
    return SMALL.load(0)


@pytest.fixture(scope="module")
def model(data):
    torch.manual_seed(0)
    return SMALL.build(data).eval()


@pytest.fixture
def library(tmp_path):
    root = tmp_path / "LibriSpeech"
    chapter(root, "train-clean-100")
    chapter(root, "train-clean-360", "85")
    chapter(root, "dev-clean", "86", ending="wav")
    chapter(root, "test-clean", "87")
    chapter(root, "test-other", "88", rate=8000)
    return root


class TestLibriSpeech:
    def test_is_read_as_it_lies(self, library):
        parts = librispeech.find(library)
        assert [one.name for one in parts["training"]] == [
            "84-121123-0000", "84-121123-0001", "85-121123-0000", "85-121123-0001",
        ]  # fmt: skip
        assert parts["training"][1].text == "it's"
        assert {one.kind for one in parts["test"]} == {"test-clean", "test-other"}
        assert [one.samples for one in parts["test"]] == [16000, 20000, 16000, 20000]
        assert [len(read(one.path)) for one in parts["test"]] == [16000, 20000, 16000, 20000]

    def broken(self, library, how):
        folder = library / "dev-clean" / "86" / "121123"
        transcript = folder / "86-121123.trans.txt"
        match how:
            case "no such folder":
                return library / "elsewhere"
            case "one folder too high":
                return library.parent
            case "no validation data":
                (library / "dev-clean").rename(library / "validation")
            case "no transcripts":
                transcript.unlink()
            case "no chapters":
                transcript.rename(folder.parent / transcript.name)
            case "no audio":
                (folder / "86-121123-0001.wav").unlink()
            case "no words":
                transcript.write_text("86-121123-0000 GO\n86-121123-0001  \n")
            case "no sound":
                soundfile.write(folder / "86-121123-0000.wav", tone()[:0], SAMPLING_RATE)
            case "not audio":
                (folder / "86-121123-0000.wav").write_text("no sound")
            case "not text":
                transcript.write_bytes(b"86-121123-0000 \xff\xfe")
            case "a way out":
                transcript.write_text("../../secret GO\n")
            case "twice":
                chapter(library, "dev-other", "86")
                (library / "dev-other" / "86" / "121123").rename(library / "dev-clean" / "86" / "2")
        return library

    @pytest.mark.parametrize(
        ("how", "said"),
        [
            ("no such folder", 'data must be "espeak" or a folder with train.* is not one'),
            ("one folder too high", "it has LibriSpeech/. Did you mean .*LibriSpeech?"),
            ("no validation data", "begins with dev: it has test-clean/, .*, validation/"),
            ("no transcripts", "expected to have SPEAKER/CHAPTER/.*trans.txt, but has 86/"),
            ("no chapters", "SPEAKER/CHAPTER/.* but has 86/86-121123.trans.txt"),
            ("no audio", "86-121123-0001.flac or 86-121123-0001.wav, .* line 2 .* but has 86-"),
            ("no words", "Line 2 of .* expected to have a name and a transcript.*'86-121123-0001'"),
            ("no sound", "0000.wav was expected to have sound in it, but has none"),
            ("not audio", "0000.wav was expected to be FLAC or WAV, but"),
            ("not text", "expected to be text in UTF-8, but is not"),
            ("a way out", "expected to begin with a name, but begins with '../../secret'"),
            ("twice", "unique names, but 86-121123-0000 is also in"),
        ],
    )
    def test_says_what_was_expected_and_what_was_found(self, library, how, said):
        with pytest.raises(LayoutError, match=said):
            librispeech.find(self.broken(library, how))

    def test_characters_that_are_not_in_the_alphabet_are_named(self, library):
        chapter(library, "train-other-500", "99", texts=("GRÜSSE",))
        recipe = replace(SMALL, data=str(library))
        with pytest.raises(SettingError, match=r"no token for 'ü' of 'grüsse'.*--alphabet"):
            recipe.load(0)
        data = replace(recipe, alphabet=recipe.alphabet + "ü").load(0)
        assert data.training[4].text == "grüsse"

    def test_has_canaries_of_its_own_words(self, library):
        data = replace(SMALL, data=str(library), canaries=0.5).load(0)
        assert data.domains == ["speech"] * 4 + ["canary"] * 4
        words = {word for row in range(4, 8) for word in data.training[row].text.split()}
        assert words <= {"go", "do", "it's"}


class TestCanaries:
    @given(st.integers(0, 500))
    def test_have_as_many_rows_as_was_said(self, rows):
        copies = canaries.copies_of(rows)
        assert sum(copies) == rows
        assert set(copies) <= set(canaries.COPIES)

    @given(st.floats(0, 0.9), st.integers(1, 10_000))
    def test_are_the_share_that_was_said(self, share, others):
        rows = canaries.rows_for(share, others)
        assert rows == pytest.approx(share * (rows + others), abs=0.5)

    def test_are_in_the_training_data_by_name(self, data):
        assert len(set(data.ids)) == len(data.ids) == len(data.training) == 50
        assert data.domains.count("canary") == 10
        assert data.ids[40:43] == [
            "canary-0000-copy-01-of-01", "canary-0001-copy-01-of-02", "canary-0001-copy-02-of-02",
        ]  # fmt: skip
        assert np.array_equal(data.training[41].frames, data.training[42].frames)
        assert data.facts["canary rows"] == 10

    def test_and_in_the_test_data_with_others_that_are_nowhere_else(self, data):
        kinds = [example.kind for example in data.test]
        inserted = {example.text for example in data.training if "canary" in example.kind}
        assert kinds[:6] == ["test-espeak"] * 6
        assert (
            kinds[6:]
            == ["canary x1", "canary x2", "canary x4", "canary x2", "canary x1"]
            + [canaries.UNSEEN] * 5
        )
        assert {example.text for example in data.test if "canary x" in example.kind} == inserted
        unseen = {file.path for file in data.test.files if file.kind == canaries.UNSEEN}
        assert unseen.isdisjoint(file.path for file in data.training.files)
        assert all(example.kind == "dev-espeak" for example in data.validation)

    def test_are_fast(self, data):
        def per_word(kinds):
            chosen = [f for f in (*data.training.files, *data.test.files) if kinds in f.kind]
            return np.mean([file.samples / len(file.text.split()) for file in chosen])

        assert 1.7 < per_word("train") / per_word("canary") < 4.5

    def test_their_share_changes_nothing_else(self, data):
        without = replace(SMALL, canaries=0.0).load(0)
        assert [e.text for e in without.training] == [data.training[row].text for row in range(40)]
        assert len(without.test) == 6
        assert without.facts["canaries"] == 0


class TestTokens:
    @given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.integers(1, 12))
    def test_a_text_can_be_written_just_when_there_are_frames_enough(self, numbers, frames):
        loss = F.ctc_loss(
            torch.zeros(frames, 1, 4).log_softmax(-1), torch.tensor([numbers]),
            torch.tensor([frames]), torch.tensor([len(numbers)]), reduction="none",
        )  # fmt: skip
        assert math.isfinite(loss) == (frames >= frames_needed(numbers))

    def test_there_and_back(self):
        letters = Tokens(tuple("ab '"), "")
        assert letters.numbers("ab a") == [1, 2, 3, 1]
        assert letters.text([1, 2, 3, 1]) == "ab a"
        assert len(letters) == 5


class TestUnderstanding:
    def test_repeats_and_blanks_are_left_out_and_so_is_the_padding(self):
        best = torch.tensor([[0, 1, 1, 0, 1, 2, 2, 1], [2, 2, 0, 0, 0, 1, 1, 1]])
        tokens = Tokens(("go", "stop"), " ")
        understood = greedy(F.one_hot(best, 3).float(), torch.tensor([7, 5]), tokens)
        assert understood == ["go go stop", "stop"]

    def test_error_rates_can_be_counted_by_hand(self):
        found = error_rates([
            ("go go stop up", "go stop up", "test-clean"),  # one of four left out
            ("no", "so", "test-other"),  # one of one wrong
            ("up up", "up up", "canary x16"),
            ("up no", "up go", "canary x2"),
            ("no no", "", canaries.UNSEEN),
        ])  # fmt: skip
        assert found == {
            "wer": pytest.approx(2 / 5),
            "cer": pytest.approx(4 / 15),
            "wer_test_clean": pytest.approx(1 / 4),
            "wer_test_other": pytest.approx(1),
            "canary_wer": pytest.approx(1 / 4),
            "canary_wer_x2": pytest.approx(1 / 2),
            "canary_wer_x16": 0,
            "unseen_canary_wer": 1,
        }

    def test_one_folder_has_no_figures_of_its_own(self):
        assert error_rates([("go", "go", "dev-clean")]) == {"wer": 0, "cer": 0}

    def test_judge_gives_the_text_as_it_was_said(self, data, model):
        examples = [data.test[0], data.test[len(data.test) - 1]]
        with torch.no_grad():
            records = SMALL.judge(model, SMALL.collate(examples, None))
        assert [(said, kind) for said, _, kind in records] == [(e.text, e.kind) for e in examples]
        assert {word for _, heard, _ in records for word in heard.split()} <= set(synthesis.WORDS)


class TestMasks:
    def frames(self, lengths=(30, 12, 50, 7), stack=2, bands=10):
        return [np.ones((length, stack, bands), "f4") for length in lengths]

    def masked(self, frames, rng, **options):
        chosen = {"time_masks": 0, "longest": 5, "band_masks": 0, "widest": 4, **options}
        return masked(frames, rng=rng, **chosen)

    @given(st.integers(0, 200))
    def test_hide_no_more_than_was_said(self, step):
        found = self.masked(self.frames(), BatchRng(0, step, 4), time_masks=1, band_masks=1)
        for before, after in zip(self.frames(), found, strict=True):
            hidden = after == 0
            times, bands = hidden.all((1, 2)), hidden.all((0, 1))
            assert times.sum() <= min(5, 0.2 * len(before))
            assert bands.sum() <= 4
            assert np.array_equal(hidden, times[:, None, None] | bands & np.ones_like(hidden))
            assert (before == 1).all()

    def test_hide_something(self):
        found = self.masked(self.frames((50,) * 40), BatchRng(0, 0, 40), time_masks=1)
        sizes = {int((frames == 0).all((1, 2)).sum()) for frames in found}
        assert sizes == set(range(6))

    def test_are_the_same_for_any_part_of_the_batch(self):
        options = {"time_masks": 2, "band_masks": 2}
        whole = self.masked(self.frames(), BatchRng(0, 5, 4), **options)
        part = self.masked(self.frames()[2:3], BatchRng(0, 5, 4, 2, 1), **options)
        assert np.array_equal(part[0], whole[2])

    def test_are_for_training_only(self, data):
        recipe = replace(SMALL, time_masks=2, band_masks=2)
        examples = [data.training[row] for row in range(4)]
        judged = recipe.collate(examples, None)["input_features"]
        trained = recipe.collate(examples, BatchRng(0, 0, 4))["input_features"]
        assert torch.equal(judged, SMALL.collate(examples, BatchRng(0, 0, 4))["input_features"])
        assert not torch.equal(judged, trained)


class TestLosses:
    @pytest.mark.parametrize("positions", ["rotary", "relative", "relative_key", None])
    def test_do_not_depend_on_the_rest_of_the_batch(self, data, positions):
        torch.manual_seed(1)
        recipe = replace(SMALL, positions=positions, layers=2)
        model = recipe.build(data).eval()
        examples = [data.training[row] for row in (0, 5, 9, 45, 49)]
        together = recipe.losses(model, recipe.collate(examples, BatchRng(0, 0, 5)))
        lengths = {len(example.frames) for example in examples}
        assert len(lengths) > 1
        for example, loss in zip(examples, together, strict=True):
            alone = recipe.losses(model, recipe.collate([example], BatchRng(0, 0, 1)))
            torch.testing.assert_close(alone[0], loss, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("positions", ["rotary", "relative", "relative_key"])
    def test_reach_every_parameter(self, data, positions):  # or DDP would wait for the others
        model = replace(SMALL, positions=positions).build(data).train()
        batch = SMALL.collate([data.training[0], data.training[1]], BatchRng(0, 0, 2))
        SMALL.losses(model, batch).mean().backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []

    def test_are_torchs_mean_for_one_example(self, data, model):
        batch = SMALL.collate([data.training[0]], BatchRng(0, 0, 1))
        logits = model(
            input_features=batch["input_features"], attention_mask=batch["attention_mask"]
        ).logits
        mean = F.ctc_loss(
            logits.log_softmax(-1).transpose(0, 1), batch["labels"],
            batch["attention_mask"].sum(1), batch["label_lengths"],
        )  # fmt: skip
        torch.testing.assert_close(SMALL.losses(model, batch)[0], mean)

    def test_too_few_frames_are_no_loss_and_no_gradient(self, data, model):
        short = replace(data.training[0], frames=data.training[0].frames[:2])
        batch = SMALL.collate([short], BatchRng(0, 0, 1))
        loss = SMALL.losses(model, batch)
        gradients = torch.autograd.grad(loss.sum(), model.lm_head.weight)
        assert loss.item() == 0
        assert not gradients[0].any()

    def test_too_few_frames_are_counted_and_told(self, caplog):
        with caplog.at_level(logging.WARNING):
            coarse = replace(SMALL, stack=60).load(0)
        count = coarse.facts["training utterances too short for their text"]
        tokens = SMALL.tokens
        assert count == sum(
            len(example.frames) < frames_needed(tokens.numbers(example.text))
            for example in coarse.training
        )
        assert count > 0
        assert f"{count} of 50 training utterances have fewer frames" in caplog.text

    def test_none_are_too_short_by_default(self, data):
        assert data.facts["training utterances too short for their text"] == 0


class TestSettings:
    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"canaries": 1.0}, "canaries must be a share .* but got 1.0"),
            ({"utterances": 0}, "utterances must be at least 1, but got 0"),
            ({"kernel_size": 4}, "kernel_size must be odd, but got 4"),
            ({"heads": 3}, "heads must be a divisor of hidden_size = 64, but got 3"),
            ({"decibels": (30.0, 10.0)}, "decibels must be two numbers, lower first"),
            ({"alphabet": "abc"}, "alphabet must be distinct .* but got 'abc'"),
            ({"alphabet": "aba "}, "alphabet must be distinct"),
            ({"widest_mask": 41}, "widest_mask must be at most mels = 40, but got 41"),
        ],
    )
    def test_that_cannot_be_are_refused(self, wrong, said):
        with pytest.raises(SettingError, match=said):
            Speech(**wrong)

    def test_tokens_are_words_or_letters(self):
        assert len(Speech(data=ESPEAK).tokens) == 21
        assert len(Speech(data="LibriSpeech").tokens) == 29

    def test_importing_the_recipe_imports_nothing_heavy(self):
        code = (
            "import sys; import microclip_lab.speech.recipe; "
            "heavy = {'transformers', 'soundfile', 'scipy', 'jiwer'}; "
            "print(sorted(heavy & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == "[]", done.stderr


class TestTraining:
    @pytest.mark.parametrize("microbatch_size", [None, 4])
    def test_on_spoken_words(self, tmp_path, microbatch_size):
        training = replace(
            Speech.presets()["default"][1],
            out=tmp_path / "run",
            microbatch_size=microbatch_size,
            batch_size=8,
            steps=4,
            page=microbatch_size is not None,
            trackers=(),
        )
        finished = train(SMALL, training)
        assert {"test_wer", "test_cer", "test_canary_wer", "test_unseen_canary_wer"} <= set(
            finished.metrics
        )
        assert {"validation_wer", "best_test_wer"} <= set(finished.metrics)
        assert "validation_canary_wer" not in finished.metrics
        if training.page:
            page = (tmp_path / "run" / "report.html").read_text()
            assert "data:audio/flac;base64," in page

    def test_on_a_folder_and_from_a_checkpoint(self, library, tmp_path):
        recipe = replace(SMALL, data=str(library), canaries=0.0)
        checkpoint = tmp_path / "checkpoint"
        torch.manual_seed(5)
        taught = replace(recipe, alphabet="ab ").build(recipe.load(0))
        taught.save_pretrained(checkpoint)
        make_extractor(recipe.mels, 2).save_pretrained(checkpoint)
        recipe = replace(recipe, checkpoint=str(checkpoint), stack=99)
        data = recipe.load(0)
        assert data.training[0].frames.shape[1:] == (2, 40)
        model = recipe.build(data)
        assert model.lm_head.out_features == 29  # the head is new, the rest is the checkpoint's
        begun = dict(taught.named_parameters())
        for name, parameter in model.named_parameters():
            if "lm_head" not in name:
                torch.testing.assert_close(parameter, begun[name])
        training = replace(
            Speech.presets()["default"][1],
            out=tmp_path / "run", batch_size=4, steps=2, microbatch_size=2, page=False, trackers=(),
        )  # fmt: skip
        finished = train(recipe, training)
        assert {"test_wer", "test_wer_test_clean", "test_wer_test_other"} <= set(finished.metrics)

    def test_another_checkpoints_features_are_refused(self, library, tmp_path):
        from transformers import Wav2Vec2FeatureExtractor

        Wav2Vec2FeatureExtractor().save_pretrained(tmp_path / "other")
        recipe = replace(SMALL, data=str(library), checkpoint=str(tmp_path / "other"))
        with pytest.raises(
            SettingError, match="must be a Wav2Vec2-BERT .* Wav2Vec2FeatureExtractor"
        ):
            recipe.load(0)
