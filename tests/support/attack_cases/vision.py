"""Vision and sound."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from attack_cases.base import D, attack, images, linear

conv2 = partial(nn.Conv2d, 2, 4, 3, padding=1)


@attack("vision", data=images, conv=conv2, head=partial(nn.Linear, 16, 3))
def max_pooling(m, x, n):
    return m.head(F.max_pool2d(m.conv(x).tanh(), 2).flatten(1))


@attack("vision", data=images, conv=conv2, pool=partial(nn.AdaptiveMaxPool2d, 2))
def adaptive_max_pooling(m, x, n):
    return m.pool(m.conv(x)).sin()


@attack("vision", data=images, conv=conv2, head=partial(nn.Conv2d, 4, 2, 3))
def pooled_and_unpooled(m, x, n):
    pooled, places = F.max_pool2d(m.conv(x), 2, return_indices=True)
    return m.head(F.max_unpool2d(pooled.tanh(), places, 2))


@attack("vision", data=images, conv=conv2, head=partial(nn.Linear, 4, 3))
def average_of_all_places(m, x, n):
    return m.head(F.adaptive_avg_pool2d(m.conv(x).tanh(), 1).flatten(1))


@attack("vision", data=images, conv=conv2, up=partial(nn.ConvTranspose2d, 4, 2, 2, stride=2))
def transposed_convolution(m, x, n):
    return m.up(F.avg_pool2d(m.conv(x).tanh(), 2))


@attack("vision", data=images, conv=conv2, head=partial(nn.Conv2d, 1, 3, 3))
def pixels_shuffled(m, x, n):
    return m.head(F.pixel_shuffle(m.conv(x), 2)).tanh()


@attack("vision", data=images, conv=conv2, deep=partial(nn.Conv2d, 4, 8, 3, groups=4, dilation=1))
def interpolated_and_depthwise(m, x, n):
    larger = F.interpolate(m.conv(x).tanh(), scale_factor=2, mode="bilinear")
    return m.deep(larger)


@attack(
    "vision",
    data=images,
    conv=conv2,
    norm=partial(nn.GroupNorm, 2, 4),
    more=partial(nn.InstanceNorm2d, 4, affine=True),
)
def group_and_instance_norm(m, x, n):
    return m.more(m.norm(m.conv(x)).sin()).sin()


@attack("vision", norm=partial(nn.RMSNorm, D), one=linear, two=partial(nn.LayerNorm, (4, D)))
def rms_and_two_dimensional_norm(m, x, n):
    return m.two(m.one(m.norm(x)))


@attack("vision", data=images, conv=conv2, head=partial(nn.Conv2d, 4, 2, 1))
def local_response_norm(m, x, n):
    return m.head(F.local_response_norm(m.conv(x), 2, alpha=0.5))


@attack("vision", data=images, conv=partial(nn.Conv2d, 2, 3, 3, padding=1, padding_mode="circular"))
def circular_padding_and_strides(m, x, n):
    return m.conv(x)[:, :, ::2, 1::2].tanh()


@attack("vision", data=images, conv=partial(nn.Conv2d, 2, 3, 3))
def convolution_without_a_batch(m, x, n):
    return torch.stack([m.conv(one).tanh() for one in x])


@attack("vision", data=images, theta=partial(nn.Linear, 2, 6), conv=conv2)
def spatial_transformer(m, x, n):
    theta = m.theta(x.mean((2, 3))).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(m.conv(x), grid, align_corners=False)


@attack("vision", data=images, patches=partial(nn.Conv2d, 2, D, 2, stride=2), one=linear)
def windows_of_a_shifted_image(m, x, n):
    """Windows of all images in one dimension, as Swin has them."""
    hidden = m.patches(x).permute(0, 2, 3, 1).roll((1, 1), (1, 2))
    windows = hidden.view(len(x), 2, 1, 1, 2, D).permute(0, 1, 3, 2, 4, 5).reshape(-1, 2, D)
    out = m.one(windows)
    return (out.softmax(1) * out).view(len(x), -1)


@attack("vision", data=images, conv=conv2)
def masked_patches(m, x, n):
    """Only some patches are visible, each example's own."""
    patches = m.conv(x).flatten(2).mT
    visible = (x.sum(1).flatten(1)).argsort(1)[:, :5]
    return patches[torch.arange(len(x))[:, None], visible].tanh()


@attack("vision", data=images, conv=partial(nn.Conv1d, 2, 3, 3), one=partial(nn.Linear, 4, 4))
def rows_of_images_as_a_batch(m, x, n):
    lines = x.permute(2, 0, 1, 3).flatten(0, 1)
    out = m.conv(m.one(lines)).view(4, len(x), 3, 2)
    return out.transpose(0, 1).tanh()
