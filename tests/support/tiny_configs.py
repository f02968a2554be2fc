"""Tiny configurations for transformers' architectures, made from the default ones by rules.

A rule is a pattern for an attribute's name and what it becomes; what no rule knows stays as it is.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import transformers as hf

WIDTH, HEADS, HEAD_DIM, LAYERS, VOCABULARY, IMAGE = 32, 4, 8, 2, 99, 32
PAD, BOS, EOS = 0, 2, 3
ORDINARY = range(8, 70)  # the tokens to write texts with; those above stand for something else
LISTS_ARE_DIVIDED_BY = 8


def at_most(limit: int) -> Callable[[int], int]:
    return lambda old: min(old, limit)


def patches(old: int) -> int:
    return 8 if old > 8 else old


# For whole numbers; the first pattern that fits the whole name decides.
RULES: list[tuple[str, int | Callable[[int], int]]] = [
    (r"(modality_)?type_vocab_size|qa_num_choices", at_most(4)),
    (r".*vocab_size(_.*)?|ngram_vocab_size_base|num_embeds", VOCABULARY),
    (r".*codebook_size", 64),
    (r"context_size", at_most(16)),
    (r"max_2d_position_embeddings|max_(rel|bucket)\w*|max_grid\w*", at_most(128)),
    (r".*max_position_embeddings|n_positions|n_ctx|max_\w*positions|max_seq_len", 64),
    (r"context_length|max_sequence_length|seq_length|block_size|model_max_length", 64),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k|num_selected_experts", at_most(2)),
    (r"(moe_)?num_shared_experts|n_shared_experts", at_most(1)),
    (r"(moe_|num_|n_)*(routed_|local_)?experts", 4),
    (r"n_group|num_expert_group", at_most(2)),
    (r"topk_group|first_k_dense_replace|num_dense_layers|decoder_sparse_step", at_most(1)),
    (r"num_kv_shared_layers|num_nextn_predict_layers|num_mtp_\w*layers", 0),
    (r"linear_num_key_heads|swa_num_key_value_heads|\w*num_key_value_(attention_)?heads", 2),
    (r"num_kv_heads|n_head_kv|multi_query_group_num|num_query_groups", 2),
    (r"mamba_n(um)?_heads", 8),
    (r"(\w+_)?(heads|num_heads|n_heads?|nhead|attention_heads)", HEADS),
    (r"(\w+_)?(head_dim|head_size|d_head|dim_head|headdim|d_kv|dim_key|kv_channels)", HEAD_DIM),
    (r"rotary_dim|qk_rope_head_dim", HEAD_DIM),
    (r"(\w+_)?(lora_rank|laurel_rank|hc_lowrank|dt_rank|time_step_rank)", 8),
    (r"(mamba_d_state|state_size|ssm_state_size)", 8),
    (r"(mamba_)?chunk_size|attention_chunk_size|linear_chunk_size", at_most(8)),
    (r"(mamba_)?n_?groups", at_most(2)),
    (r"sliding_window(_size)?|attention_window_size|local_attention|window_len", at_most(5)),
    (r"attention_window", 4),
    (r"window_size", lambda old: 2 if old < 100 else 32),  # in patches, or in pixels
    (r"index_topk|index_topk_blocks", at_most(4)),
    (r"(\w+_)?(intermediate_size|intermediate_dim|ffn_dim|ffn_hidden_size|d_ff|d_inner)", 40),
    (r"(\w+_)?(linear_units|dim_feedforward|feedforward_dim|mlp_dim|feed_forward_size)", 40),
    (r"intermediate_size_mlp|mlp_hidden_size|feed_forward_hidden_size|inner_dim", 40),
    (r"(encoder|decoder)_ffn_size|dense_ffn\w*|expert_ffn\w*", 40),
    (r"(\w+_)?(num_mel_bins|n_mels|mel_dim|input_feat_per_channel|input_feat_size)", 16),
    (r"feature_projection_input_dim|spectrogram_bins", 16),
    (r"image_size|img_size|pretrain_image_size|crop_size|max_im(a)?ge?_size", IMAGE),
    (r"patch_size", patches),
    (r"(num_)?num_frames|frames_per_clip", at_most(4)),
    (r"num_queries|num_query_tokens|num_latents|latent_query_num|\w*n_latents", 5),
    (r"num_detection_tokens|num_object_queries|num_landmarks|num_global_tokens", 5),
    (r"mm_tokens_per_image", 4),
    (r"num_denoising|num_upscale_blocks|freeze_at", 0),
    (r"num_conv_pos_embedding_groups|num_groups", 2),
    (r"num_conv_pos_embeddings", 6),
    (r"(\w+_)?(layers?|n_layer|depth|num_blocks|hidden_layers)", at_most(LAYERS)),
    (r"num_\w*_layers|\w+_layers", at_most(LAYERS)),
    (r"(\w+_)?(hidden_size\w*|hidden_dim|d_model|n_embd|emb(ed|edding)?_dim)", WIDTH),
    (r"(\w+_)?(embedding_size|projection_dim|proj_dim|embed_proj_dim|proj_size)", WIDTH),
    (r"dim|width|d_embed|d_latents|emb_size|\w+_width|codevector_dim|(\w+_)?output_dim", WIDTH),
    (r"(\w+_)?(output_size|out_dim|in_dim|condition_dim|text_dim|vit_dim)", WIDTH),
    (r"upsample_initial_channel|\w+_channels_dim|conv_channels|\w*num_filters", WIDTH),
    (r"\w*conv_channels|fusion_\w+_size|\w*_predictor_channels|\w*filter_channels", WIDTH),
    (r"\w*_units|flow_size|intra_bottleneck_size|upsample_groups", WIDTH),
]
OFF = re.compile(r".*drop.*|.*_pdrop|mask_(time|feature)_prob|.*jitter.*|fusion_droppath")
FLAGS = {
    "use_cache": False,
    "apply_spec_augment": False,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "pos_embed_rescale": None,  # a random one
    "pos_embed_jitter": None,
    "pos_embed_shift": None,
}
WIDTH_LISTS = re.compile(
    r"(\w+_)?(hidden_sizes|embed_dims?|channels|conv_dim|tdnn_dim|dims|embed_dim_per_stage"
    r"|num_channels|channel_list|neck_hidden_sizes|out_features_dims|convstream_hidden_sizes)"
)
HEAD_LISTS = re.compile(r"num_(attention_)?heads\w*")
DEPTH_LISTS = re.compile(r"depths?|layers_per_stage|num_block_repeats|\w*blocks_per_stage")
INDEX_LISTS = re.compile(r"\w*(index|indexes|indices|idxs?|layer_ids)")
TOKEN = re.compile(r".*_(token_id|token_index|token_ids)|\w+_index|\w+_(start|end|bos|eos|pad)_id")


def known(config: hf.PreTrainedConfig) -> dict[str, Any]:
    """Return a configuration's public attributes."""
    return {k: v for k, v in vars(config).items() if not k.startswith("_")}


def shrunk(config: hf.PreTrainedConfig, everywhere: dict[str, Any]) -> dict[str, Any]:
    """Return what to change in a default configuration, without its parts."""
    changes, tokens = {}, iter(range(ORDINARY.stop, VOCABULARY))
    declared = {f.name: f.default for f in dataclasses.fields(type(config))}
    for name, old in known(config).items():
        if isinstance(old, hf.PreTrainedConfig):
            continue
        if isinstance(old, list | tuple) and declared.get(name, old) is None:
            continue  # derived from the others: it will be so again
        new = tiny(name, old, tokens)
        if new != old or type(new) is not type(old):
            changes[name] = new
    if hasattr(config, "kv_lora_rank"):
        changes["num_key_value_heads"] = HEADS  # all heads' keys come from the same few numbers
    wanted = {name: value for name, value in everywhere.items() if name in known(config)}
    return changes | chosen_layers(config) | speech_frontend(config) | wanted


def tiny(name: str, old: Any, tokens: Iterator[int]) -> Any:
    if name in FLAGS:
        return FLAGS[name]
    if OFF.fullmatch(name) and isinstance(old, float):
        return 0.0
    if TOKEN.fullmatch(name) and isinstance(old, int) and not isinstance(old, bool):
        return token(name, old, tokens)
    if old is None and name in ("image_token_id", "audio_token_id"):
        return next(tokens)
    if type(old) is int and old > 0:
        return tiny_number(name, old)
    if isinstance(old, list | tuple) and old:
        return tiny_list(name, old)
    if isinstance(old, dict) and "mrope_section" in old:
        return old | {"mrope_section": [2, 1, 1]}
    return old


def token(name: str, old: int, tokens: Iterator[int]) -> int:
    for start, new in ("pad", PAD), ("bos", BOS), ("eos", EOS), ("decoder_start", BOS):
        if name.startswith(start):
            return new
    return old if old < ORDINARY.start else next(tokens)


def tiny_number(name: str, old: int) -> int:
    for pattern, new in RULES:
        if re.fullmatch(pattern, name):
            return new(old) if callable(new) else new
    return old


def tiny_list(name: str, old: list | tuple) -> list | tuple:
    kind = type(old)
    if OFF.fullmatch(name) and all(isinstance(v, float) for v in old):
        return kind(0.0 for _ in old)
    if not all(type(v) is int for v in old):
        return old
    if WIDTH_LISTS.fullmatch(name):
        return kind(max(v // LISTS_ARE_DIVIDED_BY, 4) if v > 3 else v for v in old)
    if HEAD_LISTS.fullmatch(name):
        return kind(min(v, 2) for v in old)
    if DEPTH_LISTS.fullmatch(name):
        return kind(1 for _ in old)
    if name == "vision_feature_layers":
        return kind([-1, -2])
    if INDEX_LISTS.fullmatch(name):
        return kind(sorted({min(v, LAYERS - 1) for v in old}))
    if name in ("image_size", "img_size"):
        return kind(IMAGE for _ in old)
    if name == "patch_size" and min(old) > 8:
        return kind(8 for _ in old)
    return old


def chosen_layers(config: hf.PreTrainedConfig) -> dict[str, Any]:
    """Return a few layers that show all kinds of layers which the default architecture has."""
    depth = getattr(config, "num_hidden_layers", None)
    kinds = {
        name: value
        for name, value in known(config).items()
        if name.endswith(("layer_types", "block_type", "indexer_types", "rope_layers"))
        and isinstance(value, list | tuple)
        and len(value) == depth
    }
    if not kinds:
        return {}
    rows = list(dict.fromkeys(zip(*kinds.values(), strict=True)))[:4]
    rows += rows[-1:] * (LAYERS - len(rows))
    columns = zip(*rows, strict=True)
    lists = {name: list(column) for name, column in zip(kinds, columns, strict=True)}
    return {"num_hidden_layers": len(rows), **lists}


def speech_frontend(config: hf.PreTrainedConfig) -> dict[str, Any]:
    """Return three convolutions for the seven and more which speech models start with."""
    if not isinstance(getattr(config, "conv_stride", None), list | tuple):
        return {}
    return {
        "conv_dim": (16, 16, 16),
        "conv_stride": (5, 2, 2),
        "conv_kernel": (10, 3, 2),
        "num_feat_extract_layers": 3,
    }


def parts(config: hf.PreTrainedConfig) -> dict[str, hf.PreTrainedConfig]:
    return {k: v for k, v in known(config).items() if isinstance(v, hf.PreTrainedConfig)}


def anew(config, changes: dict[str, Any], everywhere: dict[str, Any], as_dicts: bool = False):
    """Build a configuration of the same kind, in which all is derived from the tiny values."""
    inner = {}
    for name, part in parts(config).items():
        change = changes.get(name, {})
        whole = isinstance(change, hf.PreTrainedConfig)
        made = change if whole else anew(part, change, everywhere, as_dicts)
        inner[name] = made.to_dict() if as_dicts else made
    own = {k: v for k, v in changes.items() if k not in inner}
    return type(config)(**shrunk(config, everywhere) | inner | own)


def in_place(config: hf.PreTrainedConfig, changes: dict[str, Any]):
    """Change a configuration where it stands, which asks nothing of its constructor."""
    inner = parts(config)
    for name, part in inner.items():
        if isinstance(change := changes.get(name, {}), dict):
            in_place(part, change)
    for name, value in (shrunk(config, {}) | changes).items():
        if name not in inner or isinstance(value, hf.PreTrainedConfig):
            setattr(config, name, value)
    return config


def variants(config_class: type, changes: dict[str, Any]) -> Iterator[Callable[[], Any]]:
    """Yield ways to a tiny configuration, the best first; each may fail."""
    start = changes.get("start", {})  # what the default configuration cannot do without
    changes = {name: value for name, value in changes.items() if name != "start"}

    def default() -> hf.PreTrainedConfig:
        return config_class(**start)

    every_head = {"num_key_value_heads": HEADS, "num_kv_heads": HEADS}
    wide = dict.fromkeys(("hidden_size", "d_model", "embed_dim", "projection_dim"), 64)
    yield lambda: padded(anew(default(), changes, {}))
    yield lambda: padded(anew(default(), changes, every_head))
    yield lambda: padded(anew(default(), changes, {}, as_dicts=True))
    yield lambda: padded(in_place(default(), changes))
    yield lambda: padded(anew(default(), changes, wide))
    yield lambda: padded(anew(default(), changes, width_lists(default())))


def width_lists(config: hf.PreTrainedConfig) -> dict[str, Any]:
    """Return the widths that stand in lists, unchanged: some models have their sums built in."""
    inner = [width_lists(part) for part in parts(config).values()]
    own = {
        name: value
        for name, value in known(config).items()
        if isinstance(value, list | tuple) and WIDTH_LISTS.fullmatch(name)
    }
    return {k: v for found in (*inner, own) for k, v in found.items()}


def padded(config: hf.PreTrainedConfig):
    """Have a padding token everywhere: heads that look for the last token need one."""
    for part in (config, *parts(config).values()):
        if getattr(part, "pad_token_id", PAD) is None:
            part.pad_token_id = PAD
    return config
