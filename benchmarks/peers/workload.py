"""Workload S1, shared by every peer: data, models, cohorts, the local step and the test.

1,000 clients hold 50 Fashion-MNIST images each, in file order. A round draws a cohort of 50; each member
takes one shuffled epoch of 5 SGD steps of batch 10 at learning rate 0.1 on cross-entropy; FedAvg with equal
weights merges. Cohorts, batch orders and initial weights are pure functions of the seed, so every peer trains
on the same batches, and the final weights of two peers may be compared with or without full participation.

Nothing here depends on the toolkit that is measured or on any peer: NumPy and PyTorch only.
"""

from __future__ import annotations

import functools
import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLIENTS = 1000
COHORT = 50
EXAMPLES_PER_CLIENT = 50
BATCH_SIZE = 10
STEPS_PER_CLIENT = EXAMPLES_PER_CLIENT // BATCH_SIZE
LEARNING_RATE = 0.1
MAX_CLIENTS = 60_000 // EXAMPLES_PER_CLIENT
TEST_EXAMPLES = 10_000

Data = tuple[Tensor, Tensor]

_DEFAULT_DATA = "/usr/share/datasets/fashion-mnist"
_IDX_IMAGES = 0x00000803
_IDX_LABELS = 0x00000801
_COHORT_STREAM = 0
_ORDER_STREAM = 1


class LeNet(nn.Module):
    """Conv 6 5x5 padded, pool, conv 16 5x5, pool, 120-84-10; 61,706 parameters. Takes N x 1 x 28 x 28."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, N x 10."""
        hidden = F.max_pool2d(F.relu(self.conv1(images)), 2)
        hidden = F.max_pool2d(F.relu(self.conv2(hidden)), 2)
        hidden = F.relu(self.fc1(hidden.flatten(1)))
        logits: Tensor = self.fc3(F.relu(self.fc2(hidden)))
        return logits


class MLP(nn.Module):
    """784-200-200-10; 199,210 parameters. Takes N x 1 x 28 x 28."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 200)
        self.fc2 = nn.Linear(200, 200)
        self.fc3 = nn.Linear(200, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, N x 10."""
        hidden = F.relu(self.fc1(images.flatten(1)))
        logits: Tensor = self.fc3(F.relu(self.fc2(hidden)))
        return logits


class CNN(nn.Module):
    """Conv 32 and 64 5x5 padded, each pooled, 512-10; 1,663,370 parameters. Takes N x 1 x 28 x 28."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(3136, 512)
        self.fc2 = nn.Linear(512, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, N x 10."""
        hidden = F.max_pool2d(F.relu(self.conv1(images)), 2)
        hidden = F.max_pool2d(F.relu(self.conv2(hidden)), 2)
        logits: Tensor = self.fc2(F.relu(self.fc1(hidden.flatten(1))))
        return logits


MODELS: dict[str, type[nn.Module]] = {"lenet": LeNet, "mlp": MLP, "cnn": CNN}


def build_model(name: str, seed: int) -> nn.Module:
    """The named model with the initial weights that PyTorch draws after `torch.manual_seed(seed)`."""
    torch.manual_seed(seed)
    return MODELS[name]()


def _read_idx(path: Path, magic: int) -> npt.NDArray[np.uint8]:
    """Bytes of a gzipped IDX file with the shape that its big-endian header declares."""
    raw = gzip.decompress(path.read_bytes())
    if int.from_bytes(raw[:4], "big") != magic:
        msg = f"{path} is not the expected IDX file: wrong magic number"
        raise ValueError(msg)
    rank = magic & 0xFF
    shape = [int.from_bytes(raw[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(rank)]
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape)


def _load(part: str, count: int) -> Data:
    """The first images (N x 1 x 28 x 28, float32 in [0, 1]) and labels (N, int64) of `train` or `t10k`."""
    folder = Path(os.environ.get("FASHION_MNIST", _DEFAULT_DATA))
    if not folder.is_dir():
        msg = f"no folder {folder}: install dataset-fashion-mnist, or name the folder in FASHION_MNIST"
        raise FileNotFoundError(msg)
    images = _read_idx(folder / f"{part}-images-idx3-ubyte.gz", _IDX_IMAGES)
    labels = _read_idx(folder / f"{part}-labels-idx1-ubyte.gz", _IDX_LABELS)
    scaled = torch.from_numpy(images[:count].astype(np.float32)).div_(255).unsqueeze_(1)
    return scaled, torch.from_numpy(labels[:count].astype(np.int64))


@functools.cache
def train_data(clients: int) -> Data:
    """Images and labels of a population in file order, read once in each process."""
    return _load("train", clients * EXAMPLES_PER_CLIENT)


def client_data(data: Data, client: int) -> Data:
    """The 50 images and labels of one client, as views: client i owns [50 i, 50 i + 50)."""
    images, labels = data
    rows = slice(client * EXAMPLES_PER_CLIENT, (client + 1) * EXAMPLES_PER_CLIENT)
    return images[rows], labels[rows]


def _generator(seed: int, stream: int, round_index: int, client: int) -> np.random.Generator:
    """A counter-based generator that depends on its four arguments only (round and client below 2**30)."""
    return np.random.Generator(np.random.Philox(key=[seed, stream << 60 | round_index << 30 | client]))


def draw_cohort(seed: int, round_index: int, clients: int, cohort: int) -> list[int]:
    """Ids of a round's members: uniform without replacement, or all in order where the cohort is everyone."""
    if cohort == clients:
        return list(range(clients))
    generator = _generator(seed, _COHORT_STREAM, round_index, 0)
    drawn: list[int] = generator.choice(clients, cohort, replace=False).tolist()
    return drawn


def client_epoch(data: Data, seed: int, round_index: int, client: int, file_order: bool) -> Data:
    """One epoch's images and labels of a client, in the order in which the batches are cut from them.

    The order is a permutation drawn from (seed, round, client), or that of the file (no copy is made then).
    """
    images, labels = client_data(data, client)
    if file_order:
        return images, labels
    order = torch.from_numpy(_generator(seed, _ORDER_STREAM, round_index, client).permutation(len(labels)))
    return images[order], labels[order]


def sgd_step(model: nn.Module, parameters: list[nn.Parameter], images: Tensor, labels: Tensor) -> None:
    """One eager SGD step in place, without stored gradients or an optimiser: the least that PyTorch asks."""
    gradients = torch.autograd.grad(F.cross_entropy(model(images), labels), parameters)
    with torch.no_grad():
        torch._foreach_add_(tuple(parameters), gradients, alpha=-LEARNING_RATE)


def train_client(model: nn.Module, parameters: list[nn.Parameter], images: Tensor, labels: Tensor) -> None:
    """One epoch of SGD in place: 5 steps of batch 10."""
    for batch in zip(images.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True):
        sgd_step(model, parameters, *batch)


@torch.no_grad()
def test_accuracy(model: nn.Module) -> float:
    """Share of the 10,000 test images that are classified correctly, in [0, 1]."""
    images, labels = _load("t10k", TEST_EXAMPLES)
    model.eval()
    batches = zip(images.split(1000), labels.split(1000), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in batches) / len(labels)


def save_weights(path: str | Path, state: dict[str, Tensor]) -> str:
    """Writes parameters under the names of this file's modules as NumPy's .npz; returns the path written."""
    target = Path(path).with_suffix(".npz").absolute()
    arrays: dict[str, Any] = {name: value.detach().numpy() for name, value in state.items()}
    np.savez(target, **arrays)
    return str(target)


def largest_difference(first: str | Path, second: str | Path) -> float:
    """Largest absolute difference between two files of weights; their names and shapes have to agree.

    After one round with everyone taking part, two float32 systems agree to about 1e-7 on each model. Later
    rounds of `cnn` tell less: rounding flips ReLU and pooling decisions, and at this learning rate a plain
    float32 loop is 2e-5 away from its float64 twin after two rounds and 2e-4 after three (20 clients).
    """
    with np.load(first) as one, np.load(second) as two:
        if {name: one[name].shape for name in one} != {name: two[name].shape for name in two}:
            msg = f"{first} and {second} do not hold the same parameters"
            raise ValueError(msg)
        return max(float(np.abs(one[name] - two[name]).max()) for name in one)
