"""Thirteen common corruptions at five severities.

Kinds after Hendrycks, Dietterich: "Benchmarking neural network robustness to common corruptions and
perturbations", ICLR 2019. The settings are those of `SEVERITIES`, and two kinds are made otherwise (see
there), so accuracies are comparable among themselves, not with published tables; for those, read the
published images (`mycelia.attacks.transforms.cifar_c`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from mycelia.attacks.filters import blurred, jpeg
from mycelia.attacks.transforms.base import Change, Images, finite_width
from mycelia.attacks.transforms.sampling import disk, filtered, line, middle, sampled
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["CORRUPTIONS", "SEVERITIES", "Corruption"]

SEVERITIES: Final[Mapping[str, tuple[float, float, float, float, float]]] = {
    "gaussian_noise": (0.04, 0.08, 0.12, 0.18, 0.26),  # standard deviation
    "shot_noise": (60, 25, 12, 6, 3),  # photons at the largest value
    "impulse_noise": (0.02, 0.05, 0.09, 0.17, 0.27),  # share of values
    "defocus_blur": (0.9, 1.3, 1.8, 2.5, 3.5),  # radius of a disk, pixels
    "glass_blur": (0.6, 1.0, 1.5, 2.1, 3.0),  # how far a pixel is fetched from at most, pixels
    "motion_blur": (2.0, 3.0, 4.5, 6.5, 9.0),  # length of a line at a random angle, pixels
    "zoom_blur": (1.08, 1.14, 1.21, 1.3, 1.4),  # largest factor
    "brightness": (0.08, 0.16, 0.25, 0.35, 0.5),  # added
    "contrast": (0.7, 0.5, 0.35, 0.2, 0.1),  # factor of the distance to the mean
    "fog": (0.3, 0.6, 1.0, 1.6, 2.5),  # fog for each part of image
    "elastic_transform": (0.4, 0.8, 1.3, 1.9, 2.7),  # root mean square of the shifts, pixels
    "pixelate": (0.8, 0.6, 0.45, 0.35, 0.25),  # share of the height and width that is kept
    "jpeg_compression": (60, 40, 25, 15, 8),  # quality
}
"""What each severity is, from 1 to 5, in images of values 0 to 1; lengths suit images of 28 to 64 pixels.

Glass blur fetches each pixel from a random place nearby, where the original swaps neighbours one after the
other; brightness is added to the values, where the original raises the V of HSV.
"""

CORRUPTIONS: Final[tuple[str, ...]] = tuple(SEVERITIES)
"""All names."""

_FIELD: Final = 3.0  # pixels: how smooth the shifts of the elastic transform are
_STEPS: Final = 10  # images in a zoom blur
_SMALLEST: Final = 1e-12


@dataclass(frozen=True)
class Corruption(Change):
    """One corruption. All severities of an image share their random numbers, so a higher one changes more.

    It is defined on images of values 0 to 1: other bounds, which have to be finite, are mapped to these.

    Attributes:
        name: one of `CORRUPTIONS`.
        severity: 1 to 5.
    """

    name: str
    severity: int = 1

    def __post_init__(self) -> None:
        if self.name not in SEVERITIES:
            raise ConfigError(
                f"corruption {self.name!r}", rule=f"one of {', '.join(CORRUPTIONS)}", who="Corruption.name"
            )
        if self.severity not in range(1, 6):
            raise ConfigError(f"severity {self.severity}", rule="1 to 5", who="Corruption.severity")

    @property
    def stream(self) -> str:
        """See `Change.stream`."""
        return f"corruption/{self.name}"

    @property
    def amount(self) -> float:
        """What the severity means, see `SEVERITIES`."""
        return float(SEVERITIES[self.name][self.severity - 1])

    def _changed(self, images: Images) -> Tensor:
        width = finite_width(images, f"Corruption({self.name!r})")
        unit = ((images.x - images.low) / width).clamp(0, 1)
        found = _MAKERS[self.name](unit, self.amount, images).clamp(0, 1)
        return images.low + found * width


def _gaussian_noise(x: Tensor, amount: float, images: Images) -> Tensor:
    return x + (amount * images.draws.normal("noise", x.shape[1:])).to(x)


def _shot_noise(x: Tensor, amount: float, images: Images) -> Tensor:
    """Poisson counts, by inverting their distribution term by term: more light keeps the same rank."""
    chance, mean = images.draws.uniform("photons", x.shape[1:]), x.double() * amount
    term = torch.exp(-mean)
    below, count = term.clone(), torch.zeros_like(mean)
    for k in range(1, math.ceil(amount + 12 * math.sqrt(amount) + 30)):  # what lies beyond has no chance
        more = chance > below
        if not bool(more.any()):
            break
        count += more
        term *= mean / k
        below += term
    return (count / amount).to(x)


def _impulse_noise(x: Tensor, amount: float, images: Images) -> Tensor:
    hit = images.draws.uniform("values", x.shape[1:]) < amount
    return torch.where(hit, (images.draws.signs("salt", x.shape[1:]) > 0).to(x), x)


def _defocus_blur(x: Tensor, amount: float, images: Images) -> Tensor:
    return filtered(x, disk(amount))


def _glass_blur(x: Tensor, amount: float, images: Images) -> Tensor:
    i, j = middle(*images.size)
    shift = amount * (2 * images.draws.uniform("shifts", (2, *images.size)) - 1)
    return sampled(x, i.to(shift) + shift[:, 0], j.to(shift) + shift[:, 1], "border")


def _motion_blur(x: Tensor, amount: float, images: Images) -> Tensor:
    return filtered(x, line(amount, 180 * images.draws.uniform("angle")))


def _zoom_blur(x: Tensor, amount: float, images: Images) -> Tensor:
    i, j = middle(*images.size)
    found = torch.zeros_like(x)
    for k in range(_STEPS):
        factor = 1 + (amount - 1) * k / (_STEPS - 1)
        found += sampled(x, i / factor, j / factor, "border")
    return found / _STEPS


def _brightness(x: Tensor, amount: float, images: Images) -> Tensor:
    return x + amount


def _contrast(x: Tensor, amount: float, images: Images) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return mean + amount * (x - mean)


def _fog(x: Tensor, amount: float, images: Images) -> Tensor:
    """A mean of image and fog; the fog's spectrum falls with the frequency, as that of clouds does."""
    height, width = images.size
    noise = images.draws.normal("fog", (1, height, width))
    down = torch.fft.fftfreq(height, dtype=noise.dtype, device=noise.device)[:, None]
    frequency = torch.hypot(down, torch.fft.rfftfreq(width, dtype=noise.dtype, device=noise.device))
    frequency[0, 0] = 1  # the mean is taken out below
    cloud: Tensor = torch.fft.irfft2(torch.fft.rfft2(noise) / frequency**1.5, s=(height, width))
    low, high = cloud.amin((2, 3), keepdim=True), cloud.amax((2, 3), keepdim=True)
    cloud = ((cloud - low) / (high - low).clamp(min=_SMALLEST)).to(x)
    return (x + amount * cloud) / (1 + amount)


def _elastic_transform(x: Tensor, amount: float, images: Images) -> Tensor:
    i, j = middle(*images.size)
    field = blurred(images.draws.normal("shifts", (2, *images.size)), _FIELD, "nchw", "nearest")
    field = field / field.square().mean((1, 2, 3), keepdim=True).sqrt().clamp(min=_SMALLEST)
    return sampled(x, i.to(field) + amount * field[:, 0], j.to(field) + amount * field[:, 1], "border")


def _pixelate(x: Tensor, amount: float, images: Images) -> Tensor:
    height, width = images.size
    small = max(1, round(amount * height)), max(1, round(amount * width))
    return functional.interpolate(
        functional.interpolate(x, small, mode="area"), (height, width), mode="nearest-exact"
    )


def _jpeg_compression(x: Tensor, amount: float, images: Images) -> Tensor:
    if x.shape[1] not in (1, 3):
        raise DataError(
            f"{x.shape[1]} channels", rule="JPEG has 1 or 3", who='Corruption("jpeg_compression")'
        )
    return jpeg(x, int(amount), "nchw")


_MAKERS: Final[Mapping[str, Callable[[Tensor, float, Images], Tensor]]] = {
    "gaussian_noise": _gaussian_noise,
    "shot_noise": _shot_noise,
    "impulse_noise": _impulse_noise,
    "defocus_blur": _defocus_blur,
    "glass_blur": _glass_blur,
    "motion_blur": _motion_blur,
    "zoom_blur": _zoom_blur,
    "brightness": _brightness,
    "contrast": _contrast,
    "fog": _fog,
    "elastic_transform": _elastic_transform,
    "pixelate": _pixelate,
    "jpeg_compression": _jpeg_compression,
}
