"""The language recipe: VADER's sentences, tokens, losses, choices, training, and the presets."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

import microclip
from microclip.engines.base import CannotFuseError
from microclip_lab.language import vader
from microclip_lab.language.encoding import Encoder, judged_batch, load_tokenizer, train_tokenizer
from microclip_lab.language.examples import Example
from microclip_lab.language.recipe import Language, choose
from microclip_lab.language.superglue_tasks import NAMES
from microclip_lab.training.batch_rng import BatchRng
from microclip_lab.training.config import SettingError, Training
from microclip_lab.training.fetch import cache_folder
from microclip_lab.training.train import train

from superglue_folders import make

TEXTS = ["a small boat sails to Lund", "the large boat sank", "Ada waited for Bo"]


@pytest.fixture
def folder(tmp_path):
    return make(tmp_path / "superglue")


@pytest.fixture
def tiny(folder):
    return Language(
        data=str(folder), vocabulary=300, width=16, feed_forward=16, heads=2, source_length=64
    )


@pytest.fixture
def loaded(tiny):
    """A recipe, its data, and a model without dropout."""
    data = tiny.load(0)
    return tiny, data, tiny.build(data).eval()


def sentence(id, domain, mean, ratings=(1,)):
    return vader.Sentence(f"{domain}-{id}", domain, f"text {domain} {id}", mean, tuple(ratings))


class TestVader:
    """Its sentences, from an archive as it is published."""

    @pytest.fixture
    def archive(self, tmp_path):
        """Return two sentences per domain, with ratings in another order and CRLF line ends."""

        def packed(files):
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
                for name, content in files.items():
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
            return buffer.getvalue()

        inner = {}
        for name in vader.FILES.values():
            truth = "1_1\t2.5\tOh, so good. \r\n1_2\t-0.5\tNot “good”\tat all?\r\n"
            truth = truth.replace("\tat", " at")
            ratings = "1_2\t-0.5\t0.5\t[-1, 0]\r\n1_1\t2.5\t0.5\t[2, 3]\r\n"
            inner[f"hutto_ICWSM_2014/{name}_GroundTruth.txt"] = truth.encode()
            inner[f"hutto_ICWSM_2014/{name}_anonDataRatings.txt"] = (
                b"\xef\xbb\xbf" + ratings.encode()
            )
        path = tmp_path / vader.PACKAGE.file
        path.write_bytes(packed({vader.INNER: packed(inner)}))
        return path

    def test_ratings_are_found_by_id(self, archive):
        found = vader.read(archive)
        assert len(found) == 8
        assert found[0] == vader.Sentence("movie-1_1", "movie", "Oh, so good. ", 2.5, (2, 3))
        assert found[1].ratings == (-1, 0)
        assert found[1].document == found[0].document == "movie-1"

    def test_what_a_mean_says(self):
        assert [vader.answer(mean, 0.5) for mean in (-4, -0.5, -0.49, 0, 0.49, 0.5, 4)] == [
            *("negative", "negative", "neutral", "neutral", "neutral", "positive", "positive")
        ]

    def test_documents_stay_together_and_twins_are_taken_once(self):
        found = [sentence(f"{d}_{i}", "nyt", 1.0) for d in range(100) for i in range(3)]
        found.append(replace(found[0], id="nyt-999_1"))
        parts = {}
        for one, part in vader.split(found):
            parts.setdefault(one.document, set()).add(part)
        assert all(len(part) == 1 for part in parts.values())
        assert len(parts) == 100  # the twin's document had nothing else
        assert Counter(part for [part] in parts.values()) == {0: 70, 1: 10, 2: 20}

    def test_one_rater_teaches_and_the_mean_examines(self):
        found = [sentence(i, "tweets", 2.0, [3, 3, 3, -1, 0]) for i in range(1000)]
        splits = vader.load(found, 0, "rater", neutral=False)
        given = Counter(example.target for example in splits.training)
        assert given.keys() == {"positive", "negative"}  # who took no side is not asked
        assert abs(given["negative"] / given.total() - 1 / 4) < 0.05
        assert {example.truth for example in splits.training} == {"positive"}
        assert {example.target for example in (*splits.validation, *splits.test)} == {"positive"}
        assert splits == vader.load(found, 0, "rater", neutral=False)
        assert splits != vader.load(found, 1, "rater", neutral=False)

        three = vader.load(found, 0, "rater", neutral=True).training
        assert {example.target for example in three} == {"positive", "negative", "neutral"}
        assert all(e.target == e.truth for e in vader.load(found, 0, "mean", True).training)

    def test_neutral_sentences_are_left_out_unless_asked_for(self):
        found = [sentence(i, "movie", mean) for i, mean in enumerate([0.2, -0.3, 1, -1] * 25)]
        two, three = (vader.load(found, 0, "mean", neutral) for neutral in (False, True))
        assert len(three.training) == 70
        assert {e.choices for e in two.training} == {("negative", "positive")}
        assert [e for e in three.training if e.truth != "neutral"] == [
            replace(e, choices=three.training[0].choices) for e in two.training
        ]

    @pytest.fixture
    def every_domain(self, monkeypatch):
        """Let the recipe find 100 sentences of each domain, each with two raters."""
        found = [sentence(i, d, 1.0, [2, -1]) for d in vader.DOMAINS for i in range(100)]
        monkeypatch.setattr(vader, "sentences", lambda: found)

    def sentences_of(self, seed=0, **options):
        return Language(labels="rater", **options)._splits(seed)

    def test_domains_are_taken_with_the_raters_they_have_among_all(self, every_domain):
        whole, some = self.sentences_of(), self.sentences_of(domains=("tweets", "movie"))
        for part in ("training", "validation", "test"):
            expected = [e for e in getattr(whole, part) if e.domain in ("movie", "tweets")]
            assert getattr(some, part) == expected != []

    def test_shares_of_the_training_sentences_are_drawn_by_the_seed(self, every_domain):
        whole, mixture = self.sentences_of(), self.sentences_of(training_shares=(1, 0.2, 0.1, 0.01))
        counts = Counter(example.domain for example in mixture.training)
        assert counts == {"movie": 70, "nyt": 14, "tweets": 7, "amazon": 1}
        assert (mixture.validation, mixture.test) == (whole.validation, whole.test)
        assert [e for e in whole.training if e in mixture.training] == mixture.training
        assert mixture == self.sentences_of(training_shares=(1, 0.2, 0.1, 0.01))
        # neither other domains nor their shares have a say; a larger share has all of a smaller
        alone = self.sentences_of(domains=("tweets", "nyt"), training_shares=(0.1, 0.5))
        tweets = [e for e in mixture.training if e.domain == "tweets"]
        assert [e for e in alone.training if e.domain == "tweets"] == tweets
        assert {e.id for e in mixture.training if e.domain == "nyt"} < {
            e.id for e in alone.training if e.domain == "nyt"
        }
        other = self.sentences_of(seed=1, training_shares=(1, 0.2, 0.1, 0.01))
        assert {e.id for e in tweets} != {e.id for e in other.training if e.domain == "tweets"}

    def test_losses_of_a_domain_have_its_weight(self, every_domain):
        small = {"vocabulary": 300, "width": 16, "feed_forward": 16, "heads": 2}
        plain = Language(domains=("tweets", "movie"), **small)
        weighted = replace(plain, domain_weights=(3.0, 0.5))
        data = plain.load(0)
        model = plain.build(data).eval()
        batch = plain.collate(data.training, BatchRng(0, 0, len(data.training)))
        assert "weights" not in batch
        expected = torch.tensor([{"tweets": 3.0, "movie": 0.5}[d] for d in data.domains])
        heavier = weighted.collate(data.training, BatchRng(0, 0, len(data.training)))
        assert torch.equal(heavier["weights"], expected)
        assert torch.equal(
            weighted.losses(model, heavier), plain.losses(model, batch) * heavier["weights"]
        )
        assert "weights" not in weighted.collate(data.test, None)

    @pytest.mark.skipif(
        not (cache_folder() / vader.PACKAGE.file).exists(),
        reason="vaderSentiment's source distribution is not in the cache, and no test fetches it",
    )
    def test_the_published_sentences(self):
        found = vader.sentences()
        counts = Counter(one.domain for one in found)
        assert counts == {"movie": 10605, "nyt": 5190, "tweets": 4200, "amazon": 3708}
        wrong = Counter()
        training = vader.load(found, 0, "rater", neutral=True).training
        for example in training:
            wrong[example.domain] += example.target != example.truth
        sizes = Counter(example.domain for example in training)
        shares = [wrong[domain] / sizes[domain] for domain in ("movie", "amazon", "tweets", "nyt")]
        assert shares == pytest.approx([0.11, 0.14, 0.20, 0.30], abs=0.02)


class TestTokenizer:
    def test_every_process_comes_to_the_same(self):
        code = (
            "import hashlib\n"
            "from microclip_lab.language.encoding import train_tokenizer\n"
            f"made = train_tokenizer({TEXTS * 5!r}, 60).backend_tokenizer.to_str()\n"
            "print(hashlib.sha256(made.encode()).hexdigest())"
        )
        said = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": "7"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        here = train_tokenizer(TEXTS * 5, 60).backend_tokenizer.to_str()
        assert said == hashlib.sha256(here.encode()).hexdigest()

    def test_tokens_are_numbered_as_t5_does(self):
        made = train_tokenizer(TEXTS, 60)
        assert made.convert_tokens_to_ids(["<pad>", "</s>", "<unk>"]) == [0, 1, 2]
        assert made("boat 7")["input_ids"][-2:] == [2, 1]  # no 7 was ever seen
        assert made.decode(made(TEXTS[0])["input_ids"], skip_special_tokens=True) == (
            TEXTS[0].lower()
        )

    def test_long_texts_are_cut_and_keep_their_end(self):
        encoder = Encoder(train_tokenizer(TEXTS, 60), source_length=5, target_length=3)
        example = Example("1", "rte", TEXTS[0], TEXTS[1], (TEXTS[1], "Bo"), (TEXTS[1],))
        [encoded] = encoder.judged([example])
        assert len(encoded.source) == 5
        assert encoded.source[-1] == 1
        assert [choice.tolist()[-1] for choice in encoded.choices] == [1, 1]
        assert len(encoded.choices[0]) == len(encoded.target) == 3

    def test_a_checkpoint_without_one_is_said(self, tmp_path):
        with pytest.raises(SettingError, match=r"tokenizer of .* could not be loaded"):
            load_tokenizer(str(tmp_path))


class TestBatches:
    def test_words_are_hidden_alike_however_a_batch_is_split(self, loaded):
        recipe, data, _ = loaded
        recipe = replace(recipe, word_dropout=0.5)
        examples = data.training[:8]
        whole = recipe.collate(examples, BatchRng(0, 3, 8))["input_ids"]
        part = recipe.collate(examples[4:6], BatchRng(0, 3, 8, 4, 2))["input_ids"]
        width = part.shape[1]
        assert torch.equal(whole[4:6, :width], part)
        assert (part == 2).any()
        plain = replace(recipe, word_dropout=0.0).collate(examples, BatchRng(0, 3, 8))["input_ids"]
        assert torch.equal(whole[whole != 2], plain[whole != 2])
        assert torch.equal(whole < 2, plain < 2)  # neither padding nor the end is hidden

    def test_choices_and_what_they_are_worth(self, loaded):
        recipe, data, _ = loaded
        batch = recipe.collate(data.test, None)
        record = batch["domain"] == batch["domain"].max().new_tensor(
            [*vader.DOMAINS, *NAMES].index("record")
        )
        assert batch["choices"].shape[:2] == (len(data.test), 5)  # ReCoRD has five
        assert batch["exact"][record].sum(1).tolist() == [2, 1] * 3  # Ada Berg, Ada; Malmo
        # "Ada Berg" has both right; "Ada" is right, and half of the other
        assert batch["f1"][record][0].tolist() == [1, 0, 0, 0, 1]
        assert (batch["exact"][~record].sum(1) == 1).all()


class TestLosses:
    def test_the_mean_over_each_answers_tokens(self, loaded):
        recipe, data, model = loaded
        batch = recipe.collate(data.training, BatchRng(0, 0, len(data.training)))
        losses = recipe.losses(model, batch)
        assert losses.shape == (len(data.training),)
        for row in (0, 30, 60, 90):
            own = {name: value[row : row + 1] for name, value in batch.items()}
            theirs = model(**own).loss  # transformers' own, over the tokens of one answer
            assert losses[row].item() == pytest.approx(theirs.item(), rel=1e-5)

    def test_padding_changes_nothing(self, loaded):
        recipe, data, model = loaded
        together = recipe.losses(model, recipe.collate(data.training[::7], BatchRng(0, 0, 200)))
        alone = [
            recipe.losses(model, recipe.collate([one], BatchRng(0, 0, 1)))
            for one in data.training[::7]
        ]
        assert len({len(one.source) for one in data.training[::7]}) > 5
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)

    def test_a_single_pass_clips_the_small_model_exactly(self, loaded):
        recipe, data, model = loaded
        batch = recipe.collate(data.training[:6], BatchRng(0, 0, 6))
        domains = ["one"] * 4 + ["other"] * 2

        def gradients(model, engine):
            model.zero_grad()
            clipper = microclip.Clipper(model, microbatch_size=2, engine=engine)
            outcome = clipper.backward(lambda b: recipe.losses(model, b), batch, domains=domains)
            assert outcome.domains == ("one", "one", "other")
            assert outcome.engine == engine
            return {name: parameter.grad for name, parameter in model.named_parameters()}

        streamed, single = gradients(model, "stream"), gradients(model, "fused")
        torch.testing.assert_close(single, streamed, rtol=1e-4, atol=1e-6)
        # and so does the model as transformers has it, which streams
        ordinary = T5ForConditionalGeneration(model.config).eval()
        ordinary.load_state_dict(model.state_dict())
        torch.testing.assert_close(gradients(ordinary, "stream"), streamed, rtol=1e-4, atol=1e-6)
        # but not in one pass, once attention drops something out
        with pytest.raises(CannotFuseError, match="relative_attention_bias"):
            gradients(ordinary.train(), "fused")
        assert gradients(model.train(), "fused").keys() == streamed.keys()

    def test_the_small_model_writes_as_transformers_has_it(self, loaded):
        _, data, model = loaded
        ordinary = T5ForConditionalGeneration(model.config).eval()
        ordinary.load_state_dict(model.state_dict())
        source = torch.tensor(data.training[0].source)[None].long()
        for cached in (True, False):
            said = [m.generate(source, max_length=6, use_cache=cached) for m in (model, ordinary)]
            assert torch.equal(*said)


class TestChoosing:
    def test_the_likeliest_answer_is_taken(self, loaded):
        _, data, model = loaded
        examples = data.test
        chosen = choose(model, judged_batch(examples)).tolist()
        for example, found in list(zip(examples, chosen, strict=True))[::3]:
            source = torch.tensor(example.source)[None].long()
            losses = []
            for choice in example.choices:
                labels = torch.tensor(choice)[None].long()
                with torch.no_grad():
                    losses.append(model(input_ids=source, labels=labels).loss * labels.shape[1])
            assert found == int(torch.stack(losses).argmin())

    def test_verdicts(self, loaded):
        recipe, data, model = loaded
        batch = recipe.collate(data.test, None)
        with torch.no_grad():
            said = recipe.judge(model, batch)
        assert [v.domain for v in said] == [
            (*vader.DOMAINS, *NAMES)[number] for number in batch["domain"]
        ]
        for row, verdict in enumerate(said):
            assert verdict.exact == batch["exact"][row, verdict.chosen]
        found = recipe.summary(said)
        assert {f"accuracy_{name}" for name in NAMES} < set(found)
        assert {"f1_cb", "f1_multirc", "exact_multirc", "f1_record", "superglue"} < set(found)
        assert found["accuracy"] == pytest.approx(np.mean([v.exact for v in said]))


class TestRecipe:
    def test_facts_and_descriptions(self, loaded):
        recipe, data, _ = loaded
        assert data.facts["training examples by domain"]["multirc"] == 40
        majorities = data.facts["majority accuracy by domain"]
        assert majorities["multirc"] == 0.6  # three of five answers are False
        assert recipe.describe(data, 0) == {
            "text": "boolq question: is boat 0 small passage: Boat 0 is large.",
            "label": "False",
            "domain": "boolq",
        }
        rated = replace(data, examples=[replace(data.examples[0], truth="True")])
        assert recipe.describe(rated, 0)["truth"] == "True"

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"source_length": 0}, "source_length must be 1 or more, but got 0"),
            ({"dropout": 1.0}, "dropout must be at least 0"),
            ({"width": 30}, "multiple of heads, but got 30 and 4"),
            ({"pretrained": False}, "--no-pretrained needs a checkpoint"),
            ({"dropout": None}, "--dropout none needs a checkpoint"),
            ({"tasks": ("Boolq",)}, "tasks must be among BoolQ, .* but got Boolq"),
            ({"most_per_task": 0}, "most_per_task must be 1 or more"),
            ({"domains": ("films",)}, "domains must be among movie, .* but got films"),
            ({"domains": ("nyt", "nyt")}, "without duplicates, but got nyt, nyt"),
            ({"training_shares": (0.5, 0.1)}, "movie, nyt, tweets, amazon, .* got 2: 0.5, 0.1"),
            ({"training_shares": (1, 1, 1, 0)}, "above 0 and up to 1, but got 0"),
            ({"domains": ("nyt",), "domain_weights": (1, 2)}, "each of nyt, .* but got 2: 1, 2"),
            ({"domain_weights": (1, 1, 1, float("inf"))}, "finite and above 0, but got inf"),
            ({"data": "folder", "domains": ("nyt",)}, "with vader only, but the data is folder"),
            ({"data": "folder", "domain_weights": (1.0,)}, "domain_weights works with vader only"),
        ],
    )
    def test_options_that_cannot_be(self, options, said):
        with pytest.raises(SettingError, match=said):
            Language(**options)

    def test_trains_on_a_folder_and_leaves_weights_that_transformers_reads(self, tiny, tmp_path):
        training = Training(
            out=tmp_path / "run", microbatch_size=4, by_domain=True, batch_size=16, steps=6,
            evaluate_every=3, learning_rate=1e-2, trackers=(), cpu=True,
        )  # fmt: skip
        finished = train(tiny, training)
        assert {f"test_accuracy_{name}" for name in NAMES} < set(finished.metrics)
        assert (finished.path / "report.html").exists()
        facts = json.loads((finished.path / "facts.json").read_text())
        assert facts["training examples by domain"]["boolq"] == 8
        [best] = (finished.path / "checkpoints").glob("best-*")
        model = T5ForConditionalGeneration.from_pretrained(best)
        assert model.lm_head.weight is model.shared.weight

        again = train(tiny, replace(training, out=tmp_path / "again"), until=4)
        assert again.step == 4
        resumed = train(tiny, replace(training, out=tmp_path / "again", resume=True))
        assert resumed.metrics == finished.metrics

    def test_a_checkpoint_with_its_own_tokenizer(self, folder, tmp_path):
        path = checkpoint(tmp_path / "t5", T5Config(**SMALL), weights=True)
        recipe = Language(data=str(folder), checkpoint=path, dropout=None, tasks=("CB",))
        data = recipe.load(0)
        model = recipe.build(data)
        kept = T5ForConditionalGeneration.from_pretrained(path)
        assert torch.equal(model.shared.weight, kept.shared.weight)
        assert model.config.dropout_rate == 0.1
        other = replace(recipe, pretrained=False, dropout=0.3).build(data)
        assert not torch.equal(other.shared.weight, kept.shared.weight)
        assert other.config.dropout_rate == 0.3
        assert (recipe.losses(model, recipe.collate(data.training, BatchRng(0, 0, 8))) > 0).all()

    def test_a_checkpoint_that_is_not_there(self, folder, tmp_path):
        path = checkpoint(tmp_path / "t5", T5Config(**SMALL), weights=False)
        recipe = Language(data=str(folder), checkpoint=path)
        with pytest.raises(SettingError, match=r"could not be loaded: .* --no-pretrained"):
            recipe.build(recipe.load(0))


SMALL = {"vocab_size": 60, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
# google/t5-v1_1-base
BASE = {
    "vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12,
    "num_decoder_layers": 12, "num_heads": 12, "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False, "decoder_start_token_id": 0,
}  # fmt: skip


def checkpoint(path, config, weights):
    """Write a folder like the hub's, with or without weights, and a tokenizer."""
    if weights:
        T5ForConditionalGeneration(config).save_pretrained(path)
    else:
        config.save_pretrained(path)
    train_tokenizer(TEXTS, 60).save_pretrained(path)
    return str(path)


class TestPresets:
    def test_default_and_noisy_are_vader(self):
        presets = Language.presets()
        assert {"default", "noisy", "superglue", "paper"} == set(presets)
        recipe, training = presets["default"]
        assert (recipe.data, training.microbatch_size, training.by_domain) == ("vader", 4, True)
        recipe, _ = presets["noisy"]
        assert (recipe.labels, recipe.neutral) == ("rater", True)

    def test_superglue_builds_and_takes_steps(self, folder, tmp_path):
        recipe, training = Language.presets()["superglue"]
        finished = train(
            replace(recipe, data=str(folder)),
            replace(
                training, out=tmp_path / "run", steps=2, page=False, trackers=(),
                cpu=True,
            ),
        )  # fmt: skip
        assert finished.step == 2

    @pytest.mark.full
    def test_paper_builds_its_whole_model_and_takes_two_steps(self, tmp_path):
        recipe, training = Language.presets()["paper"]
        assert (training.batch_size, training.microbatch_size) == (2048, 16)
        folder = make(tmp_path / "superglue", ["RTE", "ReCoRD"], training=4, validation=2)
        path = checkpoint(tmp_path / "t5", T5Config(**BASE), weights=False)
        finished = train(
            replace(recipe, data=str(folder), checkpoint=path, pretrained=False),
            replace(
                training, out=tmp_path / "run", batch_size=4, chunk_size=2, microbatch_size=2,
                steps=2, evaluate_every=2, page=False, trackers=(), cpu=True,
            ),
        )  # fmt: skip
        assert finished.step == 2
        assert np.isfinite(finished.metrics["test_accuracy"])
        facts = json.loads((finished.path / "facts.json").read_text())
        # 247.6 million with the output layer that the real checkpoint has besides
        assert facts["parameters"] == 222_903_552
