"""Data sets by name."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np

from mycelia.engine.data.examples import Array, Dataset
from mycelia.engine.data.idx import load_idx
from mycelia.engine.data.raw import Raw, assemble, standardise
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.rng import generator

__all__ = ["breast_cancer", "diabetes", "digits", "fashion_mnist", "synthetic", "wine"]

_DEBIAN = Path("/usr/share/datasets")  # where Debian's dataset-* packages put their files


def digits() -> Dataset:
    """1,797 handwritten digits of 8×8 pixels, from scikit-learn."""
    table = _digits_table()
    images = (table[:, :64] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return assemble("digits", Raw(images, table[:, 64].astype(np.int64)), None, classes=10)


def _digits_table() -> Array:
    """64 pixels (0..16) and the label in each row."""
    # Importing scikit-learn takes seconds, reading the file it ships takes milliseconds.
    package = importlib.util.find_spec("sklearn")
    for folder in (package.submodule_search_locations if package else None) or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])


def fashion_mnist() -> Dataset:
    """70,000 pictures of clothes, 28×28 (Xiao et al., 2017), with the set's own test part.

    Looked for in `$MYCELIA_DATA`, the folder of Debian's `dataset-fashion-mnist`, and torchvision's layout
    under the current and the home folder.

    Raises:
        DataError: found nowhere; the message lists the places and how to get it.
    """
    places = _places("fashion-mnist", "FashionMNIST/raw")
    found = next((place for place in places if any(place.glob("train-images-idx3-ubyte*"))), None)
    if found is None:
        raise DataError(
            f"not found in {', '.join(map(str, places))}",
            fix="apt-get install dataset-fashion-mnist, or set MYCELIA_DATA to a folder that has it",
            who="data 'fashion-mnist'",
        )
    train, test = load_idx(found)
    for part in (train, test):
        if part is None or part.inputs.shape[1:] != (28, 28):
            raise DataError(
                "has no test images" if part is None else f"has images of shape {part.inputs.shape[1:]}",
                rule="training and test images of 28×28",
                fix="download it again",
                who=str(found),
            )
    return assemble("fashion-mnist", train, test, classes=10)


def breast_cancer(*, standardised: bool = True) -> Dataset:
    """569 tumours, 30 features, benign or malignant, from scikit-learn; features standardised."""
    return _bunch("breast-cancer", "load_breast_cancer", 2, standardised)


def wine(*, standardised: bool = True) -> Dataset:
    """178 wines, 13 features, three growers, from scikit-learn; features standardised."""
    return _bunch("wine", "load_wine", 3, standardised)


def diabetes(*, standardised: bool = True) -> Dataset:
    """442 patients, 10 features, progression after a year (regression), from scikit-learn.

    Features and target are standardised, so that the test loss `mse` is near 1 − R².
    """
    return _bunch("diabetes", "load_diabetes", 0, standardised)


def synthetic(
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    clients: int = 30,
    examples_per_client: int = 0,
    features: int = 60,
    classes: int = 10,
    seed: int = 0,
) -> Dataset:
    """Synthetic(α, β): clients whose models and inputs differ, with a client column.

    Source: Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, section 5.1.

    Args:
        alpha: variance of the clients' model means: how much their labelling differs.
        beta: variance of the clients' input means: how much their inputs differ.
        clients: number of clients.
        examples_per_client: examples of each; 0: 50 plus a log-normal number (μ 4, σ 2), as in the paper.
        features: number of inputs.
        classes: number of classes.
        seed: names the streams, one for each client.
    """
    who = "data 'synthetic'"
    numbers = {"clients": clients, "features": features, "classes": classes}
    if any(not isinstance(number, int) or number < 1 for number in numbers.values()):
        raise ConfigError(f"has {numbers}", rule="integers, at least 1", who=who)
    if examples_per_client < 0 or not (0 <= alpha < np.inf and 0 <= beta < np.inf):
        raise ConfigError(
            f"alpha {alpha}, beta {beta}, examples_per_client {examples_per_client}",
            rule="finite and at least 0",
            who=who,
        )
    variances = np.arange(1, features + 1) ** -1.2
    inputs, targets, owners = [], [], []
    for client in range(clients):
        rng = generator(seed, "data.synthetic", client=client)
        count = examples_per_client or 50 + int(rng.lognormal(4, 2))
        model_mean = rng.normal(0, np.sqrt(alpha))
        input_mean = rng.normal(rng.normal(0, np.sqrt(beta)), 1, features)
        weights, bias = rng.normal(model_mean, 1, (features, classes)), rng.normal(model_mean, 1, classes)
        x = rng.normal(input_mean, np.sqrt(variances), (count, features))
        inputs.append(x.astype(np.float32))
        targets.append((x @ weights + bias).argmax(axis=1))
        owners.append(np.full(count, client))
    raw = Raw(np.concatenate(inputs), np.concatenate(targets), np.concatenate(owners))
    return assemble("synthetic", raw, None, classes=classes)


def _bunch(name: str, loader: str, classes: int, standardised: bool) -> Dataset:
    from sklearn import datasets

    bunch: Any = getattr(datasets, loader)()
    names = tuple(map(str, bunch.target_names)) if classes else ()
    dataset = assemble(name, Raw(bunch.data, bunch.target, class_names=names), None, classes=classes)
    return standardise(dataset) if standardised else dataset


def _places(name: str, torchvision: str) -> list[Path]:
    places: list[Path] = []
    if root := os.environ.get("MYCELIA_DATA"):
        places += [Path(root), Path(root, name), Path(root, torchvision)]
    places.append(_DEBIAN / name)
    for folder in (Path.cwd(), Path.home()):
        places += [folder / torchvision, folder / "data" / torchvision]
    return places
