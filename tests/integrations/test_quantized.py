"""Adapters on quantized bases, on a CPU: exact in every engine. Runs where a library is installed.

The twin differentiates every micro-batch alone, through the same quantized layers.
"""

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from microclip import Clipper

import properties
import reference
import trl_runs

TARGETS = ["q_proj", "v_proj", "down_proj"]
KINDS = ["bitsandbytes nf4", "bitsandbytes nf4 nested", "bitsandbytes int8", "torchao int8"]


def base(dtype):
    torch.manual_seed(0)
    shape = {**trl_runs.SHAPE, "hidden_size": 64, "intermediate_size": 128}
    config = LlamaConfig(vocab_size=23, pad_token_id=0, eos_token_id=1, **shape)
    return LlamaForCausalLM(config).to(dtype)


def quantized(kind, dtype, folder):
    """Return a small Llama with LoRA on quantized layers, loaded as users load theirs."""
    from transformers import BitsAndBytesConfig, TorchAoConfig

    library = kind.partition(" ")[0]
    pytest.importorskip(library)
    if library == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        config = TorchAoConfig(Int8WeightOnlyConfig())
    elif "int8" in kind:
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype,
            bnb_4bit_use_double_quant="nested" in kind,
        )  # fmt: skip
    base(dtype).save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what these libraries say of a CPU
        net = LlamaForCausalLM.from_pretrained(
            folder, quantization_config=config, dtype=dtype, device_map="cpu"
        )
        lora = LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)
        return get_peft_model(net, lora).train()


def losses(model, tokens):
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_engine_equals_the_twin(tmp_path, kind, dtype):
    model = quantized(kind, dtype, tmp_path)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    assert type(layer) is not torch.nn.Linear or type(layer.weight) is not torch.nn.Parameter
    parameters = [p for p in model.parameters() if p.requires_grad]
    tokens = torch.randint(3, 23, (6, 9), generator=torch.Generator().manual_seed(1))
    for b in (1, 2):
        pieces = [list(range(i, i + b)) for i in range(0, 6, b)]
        each = reference.microbatch_gradients(
            lambda rows: losses(model, tokens[rows]).mean(), parameters, pieces
        )
        twin = reference.clipped_gradient(each, [b] * len(pieces), reference.WEIGH["MinNorm()"])[0]
        assert reference.norm(twin) > 0
        for engine in ("stream", "two_pass", "fused"):
            model.zero_grad()
            clipper = Clipper(model, microbatch_size=b, engine=engine)
            outcome = clipper.backward(lambda batch: losses(model, batch), tokens)
            assert outcome.engine == engine
            found = [p.grad for p in parameters]
            properties.assert_close(found, twin, 1e-5 if dtype == torch.float32 else 2e-2)
