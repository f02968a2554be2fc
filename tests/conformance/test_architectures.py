"""Architectures of transformers, tiny and from scratch: exact in a single pass, or refused.

A sample of them; all are run by hand: python tests/support/architectures.py --engines fused auto
"""

import pytest

import architectures

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about itself and torch

WELL_KNOWN = (
    "bart", "bert", "big_bird", "blip", "deberta-v2", "detr", "funnel", "gpt2", "gpt_oss", "jamba",
    "layoutlm", "led", "llama", "longformer", "mixtral", "mobilebert", "modernbert", "qwen3_moe",
    "siglip", "speecht5", "swinv2", "switch_transformers", "t5", "vilt", "vit_mae", "wav2vec2",
    "whisper", "xlm",
)  # fmt: skip
OTHERS = [name for name in architectures.names()[::20] if name not in WELL_KNOWN]


def built(name):
    case = architectures.build(name)
    if not isinstance(case, architectures.Case):
        pytest.skip(str(case))
    if architectures.classify(case)["mixes"]:
        pytest.skip("its examples mix")
    return case


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", [*WELL_KNOWN, *OTHERS])
def test_exact_or_refused(name):
    said = architectures.check(built(name), "fused", 3)
    assert said.startswith(("exact", "refused")), said


@pytest.mark.parametrize("name", ["bart", "gpt2", "led", "mixtral", "vit_mae", "whisper"])
def test_in_a_single_pass(name):
    assert architectures.check(built(name), "fused", 1).startswith("exact")


def test_the_list_is_not_a_list():
    assert len(architectures.names()) > 180
