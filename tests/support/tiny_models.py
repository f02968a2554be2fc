"""Every architecture in transformers that a tiny configuration can build, as a model with inputs.

The list is discovered, not written by hand. Knows nothing of engines.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from tiny_configs import variants
from tiny_inputs import EXAMPLES, Maker, Plan, flat, plans

PARAMETERS = 6_000_000  # more than these are not tiny

# Heads, the most natural first; further ones follow in any order.
HEADS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "MASKED_LM",
    "CAUSAL_LM",
    "SEQUENCE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
)

# Changes to configurations, for what the rules of `tiny_configs` do not get right.
RESNET = hf.ResNetConfig(
    embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=["stage4"]
)
FOUR_STAGES = {
    "num_hidden_layers": 4,
    "out_indices": [1, 2, 3, 4],
    "out_features": None,
    "reshape_hidden_states": False,
}
HYBRID = {
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "num_hidden_layers": 3,
    "attention_head_dim": 16,
    "attention_hidden_size": 64,
}
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
PARTIAL = ROPE | {"partial_rotary_factor": 0.5}
THREE_AXES = ROPE | {"mrope_section": [2, 1, 1]}
HALF_AXES = PARTIAL | {"mrope_section": [1, 1, 0]}
OVERRIDES: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 32, "time_stride": 6, "frequency_stride": 6},
    "autoformer": {"prediction_length": 5, "context_length": 12, "lags_sequence": [1, 2, 3]},
    "blip-2": {"image_token_index": 70},
    "bridgetower": {"hidden_size": 64, "num_attention_heads": 1},
    "bros": {"dim_bbox_sinusoid_emb_2d": 8, "dim_bbox_sinusoid_emb_1d": 2},
    "chameleon": {"start": {"rope_parameters": ROPE}, "vocabulary_map": {"<image>": 70}},
    "clap": {"audio_config": {"spec_size": 64}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "colqwen2": {"vlm_config": {"text_config": {"rope_parameters": THREE_AXES}}},
    "conditional_detr": {"backbone_config": RESNET},
    "dab-detr": {"backbone_config": RESNET},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1},
    "deformable_detr": {"backbone_config": RESNET},
    "depth_anything": {"backbone_config": FOUR_STAGES},
    "detr": {"backbone_config": RESNET},
    "donut-swin": {"image_size": 64},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": 99, "mask_token_id": 90, "pad_token_id": 1},
    "glm46v": {"text_config": {"rope_parameters": HALF_AXES}},
    "glm4v": {"text_config": {"rope_parameters": HALF_AXES}},
    "glm4v_moe": {"text_config": {"rope_parameters": HALF_AXES}},
    "glm4v_moe_text": {"rope_parameters": HALF_AXES},
    "glm4v_text": {"rope_parameters": THREE_AXES},
    "glm_image_text": {"rope_parameters": THREE_AXES},
    "glm_ocr": {"text_config": {"rope_parameters": THREE_AXES}},
    "glm_ocr_text": {"rope_parameters": THREE_AXES},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl_text": {"head_dim": 8},
    "informer": {"prediction_length": 5, "context_length": 12, "lags_sequence": [1, 2, 3]},
    "instructblip": {"image_token_index": 70},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48},
    "longcat_flash": {"qk_head_dim": 16},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "mistral4": {"head_dim": 16, "qk_head_dim": 16},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "neomme": {"head_dim": 16, "num_attention_heads": 2},
    "nystromformer": {"segment_means_seq_len": 16, "num_landmarks": 4},
    "prompt_depth_anything": {"backbone_config": FOUR_STAGES},
    "qwen2_5_vl": {"text_config": {"rope_parameters": THREE_AXES}},
    "qwen2_5_vl_text": {"rope_parameters": THREE_AXES},
    "qwen2_vl": {"text_config": {"rope_parameters": THREE_AXES}},
    "qwen2_vl_text": {"rope_parameters": THREE_AXES},
    "reformer": {
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "is_decoder": False,
        "hash_seed": 0,
    },
    "swin": {"image_size": 64},
    "swinv2": {"image_size": 64},
    "table-transformer": {"backbone_config": RESNET},
    "time_series_transformer": {
        "prediction_length": 5,
        "context_length": 12,
        "lags_sequence": [1, 2, 3],
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": HYBRID,
    "zamba2": HYBRID | {"n_mamba_heads": 8, "hybrid_layer_ids": [1, 2]},
    "zoedepth": {"backbone_config": FOUR_STAGES, "bottleneck_features": 32},
}


@dataclass(frozen=True)
class Skipped:
    name: str
    reason: str


@dataclass(frozen=True)
class Case:
    name: str
    model: nn.Module
    loss_fn: Callable[[dict[str, Tensor]], Tensor]
    batches: tuple[dict[str, Tensor], dict[str, Tensor]]
    plan: Plan
    outputs: tuple[str, ...] = ()
    references: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}


class TooLarge(Exception):  # noqa: N818
    pass


class OutOfTime(BaseException):
    """Not an Exception, so that nobody who tries something takes it for a failure."""


Gradient = dict[str, Tensor]


def gradient(case: Case, loss: Tensor, keep: bool = False) -> Gradient:
    parameters = case.parameters
    found = torch.autograd.grad(
        loss, list(parameters.values()), allow_unused=True, retain_graph=keep
    )
    return {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(parameters.items(), found, strict=True)
    }


def norm(found: Gradient) -> float:
    return sum(float(g.abs().square().sum()) for g in found.values()) ** 0.5


# The list


def mappings() -> list[str]:
    """Return the names of the tables that lead from configurations to models."""
    natural = [f"MODEL_FOR_{head}_MAPPING_NAMES" for head in HEADS]
    named = [n for n in dir(modeling_auto) if re.fullmatch(r"MODEL_\w*MAPPING_NAMES", n)]
    plain = "MODEL_MAPPING_NAMES"
    return [*natural, plain, *(n for n in named if n not in natural and n != plain)]


@cache
def names() -> tuple[str, ...]:
    """Return every kind of configuration that a model is made from, each class once."""
    tables = [getattr(modeling_auto, mapping) for mapping in mappings()]
    kinds = sorted({name for table in tables for name in table if name in CONFIG_MAPPING_NAMES})
    # by the names of classes: to import all of them takes seconds
    return tuple({CONFIG_MAPPING_NAMES[kind]: kind for kind in reversed(kinds)}.values())[::-1]


def model_classes(name: str) -> list[type]:
    """Return the models of a configuration, those with a natural head first."""
    found: dict[str, None] = {}
    for mapping in mappings():
        entry = getattr(modeling_auto, mapping).get(name, ())
        found.update(dict.fromkeys([entry] if isinstance(entry, str) else entry))
    return [getattr(hf, each) for each in found if hasattr(hf, each)]


# Building


class Wide(TorchFunctionMode):
    """Makes float64 of what a model would compute in float32, whatever its own type."""

    NARROW = torch.float32, torch.float16, torch.bfloat16
    CASTS = Tensor.float, Tensor.half, Tensor.bfloat16

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if isinstance(function, OpOverload):  # an engine's, in the place of what a model calls
            return function(*args, **(kwargs or {}))
        if function in self.CASTS:
            function = Tensor.double
        args = [torch.float64 if self.narrow(a) else a for a in args]
        kwargs = {k: torch.float64 if self.narrow(a) else a for k, a in (kwargs or {}).items()}
        return function(*args, **kwargs)

    def narrow(self, value: Any) -> bool:
        return isinstance(value, torch.dtype) and value in self.NARROW


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Wide():
            yield
    finally:
        torch.set_default_dtype(usual)


class Frugal(TorchDispatchMode):
    """Refuses tensors that are too large, before anything is written to them."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.numel() > PARAMETERS:
            raise TooLarge(f"a tensor of shape {tuple(made.shape)}")
        return made


def built(model_class: type, config: Any) -> nn.Module:
    torch.manual_seed(0)
    with Frugal():
        model = model_class(config)
    if sum(p.numel() for p in model.parameters()) > PARAMETERS:
        raise TooLarge(f"{sum(p.numel() for p in model.parameters())} parameters")
    if hasattr(model, "set_experts_implementation"):
        with contextlib.suppress(ValueError):  # the default one knows no float64 on CPUs
            model.set_experts_implementation("eager")
    model = model.double().train()
    without_dropout(model)
    enliven(model)
    return model


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        for name, value in vars(module).items():
            chance = isinstance(value, float) and ("drop" in name.lower() or "jitter" in name)
            if chance or (name == "p" and "Drop" in type(module).__name__):
                setattr(module, name, 0.0)


def enliven(model: nn.Module) -> None:
    """Move parameters away from zeros and other beginnings at which gradients vanish."""
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.nan_to_num_(0.0, 0.0, 0.0).clamp_(-20, 20)
            if p.is_floating_point():
                p.add_(torch.randn(p.shape, generator=random, dtype=torch.float64), alpha=0.05)


def tensors_of(outputs: Any) -> dict[str, Tensor]:
    """Return the tensors among a model's outputs that can be differentiated."""
    if isinstance(outputs, Tensor):
        outputs = {"output": outputs}
    if not hasattr(outputs, "items"):
        outputs = dict(enumerate(outputs))
    found = {}
    for name, value in outputs.items():
        several = value if isinstance(value, list | tuple) else [value]
        for i, tensor in enumerate(several):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.dim():
                found[f"{name}.{i}" if several is value else str(name)] = tensor
    return found


def rows(batch: Any, start: int, stop: int) -> Any:
    return {name: tensor[start:stop] for name, tensor in batch.items()}


def run(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    with in_float64():
        return tensors_of(model(**flat(inputs)))


def with_equal_rows(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[str, ...]:
    """Return the outputs that have as many rows for each example, however many there are."""
    everything, two = run(model, inputs), run(model, rows(inputs, 0, 2))
    kept = [
        name
        for name, value in everything.items()
        if name in two and value.numel() and value.shape[1:] == two[name].shape[1:]
        if value.shape[0] * 2 == two[name].shape[0] * EXAMPLES
    ]
    if not kept:
        shapes = {name: tuple(value.shape) for name, value in everything.items()}
        raise LookupError(f"no output has rows for each example: {shapes}")
    return tuple(kept)


def loss_of(model: nn.Module, outputs: tuple[str, ...]) -> Callable[[dict[str, Tensor]], Tensor]:
    """Return a loss for each example that depends on all outputs, smoothly."""

    def loss_fn(batch: dict[str, Tensor]) -> Tensor:
        inputs = dict(batch)
        y = inputs.pop("y")
        made = run(model, inputs)
        total = torch.zeros_like(y)
        for name in outputs:
            out = made[name]
            out = torch.view_as_real(out) if out.is_complex() else out
            out = out.reshape(len(y), -1)
            total = total + (1.3 * out).sin().mean(1) * y + out.square().mean(1)
        return total

    return loss_fn


def batch_of(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    maker = Maker(model, plan)
    with in_float64():
        batch = maker.batch()
    return batch | {"y": maker.normal()}


def case_of(name: str, model: nn.Module, plan: Plan) -> Case:
    """Return a case if the model runs with such a batch, the same each time."""
    first = batch_of(model, plan)
    inputs = rows(first, 0, EXAMPLES)
    inputs.pop("y")
    loss_fn = loss_of(model, outputs := with_equal_rows(model, inputs))
    once, again = loss_fn(first), loss_fn(first)
    if not torch.equal(once, again):
        raise ValueError("not deterministic")
    second = second_batch(model, plan, loss_fn)
    case = Case(name, model, loss_fn, (first, second), plan, outputs)
    if not math.isfinite(norm(gradient(case, once.sum()))):
        raise ValueError("the gradient is not finite")
    return case


def second_batch(model, plan, loss_fn) -> dict[str, Tensor]:
    for step in 2, 16, 0:
        batch = batch_of(model, plan.later(step))
        try:
            loss_fn(batch)
        except Exception:
            continue
        return batch
    raise ValueError("no second batch runs")


def build(name: str) -> Case | Skipped:
    """Return the first model of a configuration that can be built and run."""
    failures: dict[str, str] = {}  # by what was said: most of it is said again and again
    for model_class in model_classes(name):
        for configure in variants(CONFIG_MAPPING[name], OVERRIDES.get(name, {})):
            try:
                model = built(model_class, configure())
            except Exception as error:
                failures.setdefault(brief(error), model_class.__name__)
                continue
            for plan in plans(model):
                try:
                    return case_of(name, model, plan)
                except Exception as error:
                    failures.setdefault(brief(error), f"{model_class.__name__} with {plan}")
    said = [f"{where}: {what}" for what, where in failures.items()]
    return Skipped(name, " | ".join(said[:8]) or "no model, or no inputs that it takes")


def brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"
