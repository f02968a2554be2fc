"""The evidence plan's downloaded and synthesized data: what is marked as a dragger is one."""

import pytest
import torch

from microclip_lab.evidence import minilm, speech_tasks, text_tasks, vision_tasks
from microclip_lab.evidence.catalog import BY_NAME
from microclip_lab.language import vader
from microclip_lab.vision import cifar

pytestmark = pytest.mark.full


def test_photos_are_wrong_where_people_were():
    data = vision_tasks.photo_data(3, "worse_label")
    features, _ = vision_tasks.features()
    truth = torch.from_numpy(cifar.cifar10().training_truth)
    place = int((features == data.training.inputs[0]).all(1).nonzero()[0])
    assert bool(data.wrong[0]) == (int(data.training.targets[0]) != int(truth[place]))
    assert 0.36 < data.wrong.float().mean() < 0.44
    assert len(data.test) == 10_000
    assert not vision_tasks.photo_data(3, "clean_label").wrong.any()
    differ = data.validation.targets != data.clean_validation.targets
    assert 0.36 < differ.float().mean() < 0.44


def test_the_last_block_starts_as_the_encoders():
    task = BY_NAME["raters"].task
    one, two = task.model(1), task.model(2)
    last = minilm.encoder().encoder.layer[-1]
    assert torch.equal(one.wide.weight, last.intermediate.dense.weight)
    assert torch.equal(one.narrow.weight, two.narrow.weight)
    assert not torch.equal(one.classify.weight, two.classify.weight)
    inputs = torch.randn(5, minilm.HIDDEN)
    there = one.classify(last.output(last.intermediate(inputs), inputs))
    assert torch.allclose(one(inputs), there, atol=1e-5)


def test_similar_sentences_are_near_each_other():
    found = minilm.encoded(["a wonderful film", "a great movie", "the parliament voted on taxes"])
    cosines = torch.nn.functional.cosine_similarity(found[0], found[1:], dim=1)
    assert cosines[0] > cosines[1] + 0.1


def test_one_rater_is_sometimes_wrong_and_all_raters_are_not():
    assert 0.10 < text_tasks.rater_data(3, True, 0.0).wrong.float().mean() < 0.22
    assert 0.28 < text_tasks.rater_data(3, True, 0.25).wrong.float().mean() < 0.42
    assert not text_tasks.rater_data(3, False, 0.0).wrong.any()


def test_domains_have_their_sizes():
    data = text_tasks.domain_data(3, by_one=True)
    counts = torch.bincount(data.domains).tolist()
    assert counts == [text_tasks.SIZES[domain] for domain in vader.DOMAINS]
    assert len(data.test_domains) == len(data.test)


def test_canaries_are_fast_and_only_in_training_and_validation():
    data = speech_tasks.spoken_data(3, 0.2)
    assert int(data.wrong.sum()) == round(0.2 * len(data.training))
    assert len(data.test) >= 3000

    def spoken(inputs):  # frames that are not padding
        return (inputs.abs().sum(2) > 0).sum(1).float().mean()

    fast, usual = (spoken(data.training.inputs[rows]) for rows in (data.wrong, ~data.wrong))
    assert fast < 0.6 * usual
    assert spoken(data.test.inputs) > 0.9 * usual
    tested = {tuple(row.flatten()[:40].tolist()) for row in data.test.inputs}
    trained = {tuple(row.flatten()[:40].tolist()) for row in data.training.inputs}
    assert not tested & trained
