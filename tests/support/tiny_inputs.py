"""Batches for any transformers model: what its `forward` asks for, with examples first.

A plan says what to try: how long texts are, whether there are images, sounds and masks. Not every
model takes every plan, so `plans` gives several, the richest first.
"""

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tiny_configs import ORDINARY, PAD, known, parts

EXAMPLES = 6
CHANNELS = "num_channels", "in_chans", "in_channels", "input_channels"


@dataclass(frozen=True)
class Plan:
    """What a batch has; `turn` counts the batches, which differ in their data and lengths."""

    pixels: str = ""  # see kinds_of_pixels
    sound: str = ""  # see kinds_of_sound
    text: bool = False
    masked: bool = True
    placeholders: bool = False  # tokens that stand for the images or the sound
    length: int = 11
    turn: int = 0

    def __str__(self) -> str:
        kinds = [self.pixels, self.sound, "text" if self.text else ""]
        extra = ["mask" if self.masked else "", "placeholders" if self.placeholders else ""]
        return " + ".join(filter(None, kinds + extra))

    def later(self, step: int) -> "Plan":
        """Return the plan of the second batch, whose texts are longer."""
        return replace(self, turn=1, length=self.length + step)


def arguments(model: nn.Module) -> dict[str, inspect.Parameter]:
    named = inspect.signature(model.forward).parameters.items()
    return {k: p for k, p in named if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def required(model: nn.Module) -> set[str]:
    return {name for name, p in arguments(model).items() if p.default is p.empty}


def plans(model: nn.Module) -> Iterator[Plan]:
    """Yield what to try, with everything that the model can take first."""
    names, needed = arguments(model), required(model)
    text = "input_ids" in names
    maskable = {"attention_mask", "input_features_mask"} & names.keys()
    has_masks = [True, False] if maskable else [False]
    lengths = [11, 16, 64] if text else [11]
    tried = product(lengths, has_masks, kinds_of_pixels(names), kinds_of_sound(names))
    for length, masked, pixels, sound in tried:
        plan = Plan(pixels, sound, text, masked, length=length)
        if text and (pixels or sound):
            yield replace(plan, placeholders=True)
        if not unfed(plan, needed):
            yield plan


def kinds_of_pixels(names: Collection[str]) -> list[str]:
    if {"image_grid_thw", "grid_thw", "spatial_shapes"} & set(names):
        return ["patches", ""]
    if "pixel_values" in names:
        return ["image", "video", "large image", ""]
    return ["video", ""] if "pixel_values_videos" in names else [""]


def kinds_of_sound(names: Collection[str]) -> list[str]:
    if "input_values" in names:
        return ["wave", "frames", "bins", "long wave", "channel", ""]
    if "is_longer" in names:
        return ["channel of frames", ""]
    return ["frames", "bins", ""] if "input_features" in names else [""]


def unfed(plan: Plan, needed: set[str]) -> bool:
    """Whether a plan lacks what the model cannot do without."""
    pixels = {"pixel_values", "pixel_values_videos", "grid_thw"} & needed
    sound = {"input_values", "input_features"} & needed
    return bool((pixels and not plan.pixels) or (sound and not plan.sound))


def found(config: hf.PreTrainedConfig, *names: str, default: Any = None) -> Any:
    """Return an attribute of a configuration or, failing that, of one of its parts."""
    for part in walk(config):
        for name in names:
            value = known(part).get(name)
            if value is not None:
                return value
    return default


def walk(config: hf.PreTrainedConfig) -> Iterator[hf.PreTrainedConfig]:
    yield config
    for part in parts(config).values():
        yield from walk(part)


class Maker:
    """Makes the batches of one model, each input by the method of its name."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.config = model.config
        self.random = torch.Generator().manual_seed(1000 + plan.turn)

    def batch(self) -> dict[str, Tensor]:
        inputs: dict[str, Tensor] = {}
        for name in arguments(self.model):
            maker = self.maker(name)
            if maker is not None and (made := maker(inputs)) is not None:
                inputs[name] = made
        if missing := required(self.model) - inputs.keys():
            raise LookupError(f"unknown inputs: {', '.join(sorted(missing))}")
        return inputs

    def maker(self, name: str) -> Callable[[dict[str, Tensor]], Tensor | None] | None:
        if name in required(self.model) or name in USED:
            return getattr(self, name, None)
        return None

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(EXAMPLES, *shape, generator=self.random, dtype=torch.float64)

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, (EXAMPLES, *shape), generator=self.random)

    def ragged(self, length: int) -> Tensor:
        """Return a mask for texts of which the first fills the batch and the others may not."""
        lengths = self.whole(max(length // 2, 1), length + 1)
        lengths[0] = length
        return (torch.arange(length) < lengths[:, None]).long()

    # Texts

    def input_ids(self, inputs):
        if not self.plan.text:
            return None
        ids = self.whole(ORDINARY.start, ORDINARY.stop, self.plan.length)
        if self.plan.placeholders:
            return torch.cat([self.stand_ins(), ids], 1)
        return ids

    def stand_ins(self) -> Tensor:
        """Return the tokens in whose places the model will put what it sees or hears."""
        kinds = []
        if self.plan.pixels:
            kinds.append(("image", "pixel_values", "get_image_features"))
        if self.plan.sound:
            kinds.append(("audio", "input_features", "get_audio_features"))
        rows = []
        for kind, name, method in kinds:
            token = found(self.config, f"{kind}_token_id", f"{kind}_token_index")
            features = getattr(self.model, method, getattr(self.model.base_model, method, None))
            if token is None or features is None:
                raise LookupError(f"no tokens stand for the {kind}")
            rows.append(torch.full((EXAMPLES, self.count(features, name)), token))
        return torch.cat(rows, 1)

    def count(self, features: Callable[..., Any], name: str) -> int:
        """Return how many tokens the model makes of one example's image or sound."""
        maker, inputs = Maker(self.model, self.plan), {}
        taken = inspect.signature(features).parameters.keys() & (USED | {name})
        for each in (name, *sorted(taken - {name})):
            if (made := getattr(maker, each)(inputs)) is not None:
                inputs[each] = made
        with torch.no_grad():
            made = features(**flat(inputs))
        made = getattr(made, "pooler_output", made)
        if isinstance(made, list | tuple):
            made = torch.cat([part.reshape(-1, part.shape[-1]) for part in made])
        return made.numel() // made.shape[-1] // EXAMPLES

    def mm_token_type_ids(self, inputs):
        """Tell an image's tokens from those of the text."""
        if not self.plan.placeholders:
            return None
        return (inputs["input_ids"] >= ORDINARY.stop).long()

    def attention_mask(self, inputs):
        if not self.plan.masked:
            return None
        if "input_ids" not in inputs:
            heard = inputs.get("input_values", inputs.get("input_features"))
            if heard is None:
                return None
            return self.ragged(heard.shape[2 if self.plan.sound == "bins" else 1])
        ids = inputs["input_ids"]
        mask = self.ragged(ids.shape[1])
        if self.plan.placeholders:
            mask[:, : ids.shape[1] - self.plan.length] = 1
        ids[mask == 0] = found(self.config, "pad_token_id", default=PAD)
        return mask

    def token_type_ids(self, inputs):
        kinds = found(self.config, "type_vocab_size", default=0)
        if "input_ids" not in inputs or not isinstance(kinds, int) or kinds < 2:
            return None
        return self.whole(0, 2, inputs["input_ids"].shape[1])

    def bbox(self, inputs):
        if "input_ids" not in inputs:
            return None
        limit = found(self.config, "max_2d_position_embeddings", default=128)
        corners = self.whole(0, limit // 2 - 1, inputs["input_ids"].shape[1], 2)
        return torch.cat([corners, corners + limit // 4], 2)

    def decoder_input_ids(self, inputs):
        return self.whole(ORDINARY.start, ORDINARY.stop, 7 + self.plan.turn)

    def qformer_input_ids(self, inputs):
        return self.whole(ORDINARY.start, ORDINARY.stop, 5)

    # Images and films

    def image_shape(self) -> tuple[int, int, int]:
        channels = found(self.config, *CHANNELS, default=3)
        channels = channels if isinstance(channels, int) else 3
        size = found(self.config, "image_size", "img_size", "input_size", default=64)
        if self.plan.pixels == "large image":
            size = 128
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        return channels, height, width

    def pixel_values(self, inputs):
        if self.plan.pixels == "patches":
            return self.patches()
        if self.plan.pixels == "video":
            frames = found(self.config, "num_frames", "frames_per_clip", default=4)
            return self.normal(frames, *self.image_shape())
        return self.normal(*self.image_shape()) if self.plan.pixels else None

    def pixel_values_videos(self, inputs):
        if "pixel_values" in arguments(self.model):
            return None
        return self.pixel_values(inputs)

    def patches(self) -> Tensor:
        """Return images in patches: sixteen rows for each, which some models take as they are."""
        size, times = found(self.config, "patch_size"), found(self.config, *TIMES, default=1)
        if "spatial_shapes" in arguments(self.model):
            times = 1
        return self.normal(16, self.image_shape()[0] * times * size**2)

    def hidden_states(self, inputs):
        return self.patches()

    def image_grid_thw(self, inputs):
        if self.plan.pixels != "patches":
            return None
        return torch.tensor([[1, 4, 4]]).repeat(EXAMPLES, 1)

    def grid_thw(self, inputs):
        return self.image_grid_thw(inputs)

    def spatial_shapes(self, inputs):
        if self.plan.pixels != "patches":
            return None
        return torch.tensor([[4, 4]]).repeat(EXAMPLES, 1)

    def pixel_attention_mask(self, inputs):
        if "spatial_shapes" not in arguments(self.model) or self.plan.pixels != "patches":
            return None
        return torch.ones(EXAMPLES, 16, dtype=torch.long)

    def image_sizes(self, inputs):
        if not self.plan.pixels:
            return None
        return torch.tensor([self.image_shape()[1:]]).repeat(EXAMPLES, 1)

    def flattened_patches(self, inputs):
        size = found(self.config, "patch_embed_hidden_size", default=32)
        places = torch.arange(1, 10).expand(EXAMPLES, 9)[..., None].double()
        return torch.cat([places, places.flip(1), self.normal(9, size)], 2)

    def image_embeds_position_mask(self, inputs):
        """Say that the first few tokens are an image's."""
        if not self.plan.pixels:
            return None
        count = found(self.config, "latent_query_num", default=5)
        return (torch.arange(inputs["input_ids"].shape[1]) < count).expand(EXAMPLES, -1).long()

    def image_attention_mask(self, inputs):
        if self.plan.pixels != "video" or "perceiver_embeddings" not in arguments(self.model):
            return None
        return torch.ones(EXAMPLES, self.plan.length, inputs["pixel_values"].shape[1])

    def visual_feats(self, inputs):
        return self.normal(7, found(self.config, "visual_feat_dim", default=32))

    def visual_pos(self, inputs):
        return self.normal(7, 4)

    def noise(self, inputs):
        """Return the noise by which masked autoencoders choose patches, else drawn anew."""
        if self.plan.pixels and (patch := found(self.config, "patch_size")):
            _, height, width = self.image_shape()
            return self.normal((height // patch) * (width // patch))
        return None

    # Sounds

    def wave(self, length: int) -> Tensor:
        return self.normal(length + 40 * self.plan.turn)

    def spectrum(self, inputs):
        bins = found(self.config, *BINS, default=16)
        length = found(self.config, "max_length", default=0)
        if not 16 < length < 100:
            length = 2 * found(self.config, "max_source_positions", default=16)
        shape = (length, bins) if self.plan.sound == "frames" else (bins, length)
        return self.normal(*shape)

    def input_values(self, inputs):
        if "wave" in self.plan.sound:
            return self.wave(4000 if "long" in self.plan.sound else 400)
        if self.plan.sound == "channel":
            return self.wave(1280)[:, None]
        return self.spectrum(inputs) if self.plan.sound else None

    def input_features(self, inputs):
        if "input_values" in inputs or not self.plan.sound:
            return None
        if self.plan.sound == "channel of frames":
            return self.normal(1, 256, found(self.config, *BINS, default=16))
        return self.spectrum(inputs)

    def input_features_mask(self, inputs):
        if "input_features" not in inputs:
            return None
        length = inputs["input_features"].shape[1 if self.plan.sound == "frames" else 2]
        if self.plan.placeholders:  # as many for each example
            return torch.ones(EXAMPLES, length, dtype=torch.long)
        return self.ragged(length) if self.plan.masked else None

    def feature_attention_mask(self, inputs):
        return self.input_features_mask(inputs)

    def is_longer(self, inputs):
        return torch.zeros(EXAMPLES, 1, dtype=torch.bool)

    # Series of numbers

    def past_values(self, inputs):
        """Return as many numbers as the model looks back, with those that lag behind them."""
        length = found(self.config, "context_length", default=16)
        if lags := found(self.config, "lags_sequence"):
            return self.normal(length + max(lags))
        channels = found(self.config, "num_input_channels")
        return self.normal(length, channels) if channels else self.normal(length)

    def past_time_features(self, inputs):
        times = max(found(self.config, "num_time_features", default=0), 0)
        return self.normal(inputs["past_values"].shape[1], times)

    def past_observed_mask(self, inputs):
        if "past_time_features" not in arguments(self.model):
            return None
        return torch.ones_like(inputs["past_values"])

    def future_values(self, inputs):
        if "past_time_features" not in arguments(self.model):
            return None
        return self.normal(found(self.config, "prediction_length"))

    def future_time_features(self, inputs):
        return self.normal(found(self.config, "prediction_length"), 0)

    def past_values_padding(self, inputs):
        return torch.zeros_like(inputs["past_values"])

    def freq(self, inputs):
        return torch.zeros(EXAMPLES, 1, dtype=torch.long)

    # Trajectories

    def states(self, inputs):
        return self.normal(7, found(self.config, "state_dim"))

    def actions(self, inputs):
        return self.normal(7, found(self.config, "act_dim"))

    def rewards(self, inputs):
        return self.normal(7, 1)

    def returns_to_go(self, inputs):
        return self.normal(7, 1)

    def timesteps(self, inputs):
        return torch.arange(7).repeat(EXAMPLES, 1)


def flat(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join the examples' patches in one list, for models that tell them apart by their grids."""
    if not {"image_grid_thw", "grid_thw"} & inputs.keys():
        return inputs
    joined = {"pixel_values", "hidden_states"} & inputs.keys()
    return inputs | {name: inputs[name].flatten(0, 1) for name in joined}


TIMES = "temporal_patch_size", "patch_temporal"


BINS = (
    "num_mel_bins",
    "n_mels",
    "input_feat_per_channel",
    "feature_projection_input_dim",
    "input_feat_size",
    "feature_size",
    "input_dim",
)
# The inputs to give although a model can do without.
USED = {
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "bbox",
    "decoder_input_ids",
    "pixel_values",
    "pixel_values_videos",
    "input_values",
    "input_features",
    "noise",
    "image_grid_thw",
    "spatial_shapes",
    "pixel_attention_mask",
    "flattened_patches",
    "image_embeds_position_mask",
    "image_attention_mask",
    "visual_feats",
    "visual_pos",
    "input_features_mask",
    "feature_attention_mask",
    "mm_token_type_ids",
    "image_sizes",
    "is_longer",
    "past_observed_mask",
    "future_values",
    "future_time_features",
    "states",
    "actions",
    "rewards",
    "returns_to_go",
    "timesteps",
}
