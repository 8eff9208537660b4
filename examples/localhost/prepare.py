"""Split Fashion-MNIST among three devices: each gets a third of its images, in a file of its own.

python prepare.py [--examples N]      # N: only so many training images for each device
"""

import argparse
from pathlib import Path

import numpy as np

from mycelia.engine.data import Examples, load

DEVICES = 3
FOLDER = Path(__file__).parent / "data"


def third(part: Examples, device: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Every third image, from the device's own first one on; the set is in random order."""
    rows = np.arange(device, len(part), DEVICES)[:most]
    own = part.take(rows)
    return own.inputs, own.targets


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--examples", type=int, default=20_000)
    most = parser.parse_args().examples
    whole = load("fashion-mnist")
    FOLDER.mkdir(exist_ok=True)
    for device in range(DEVICES):
        x_train, y_train = third(whole.train, device, most)
        x_test, y_test = third(whole.test, device, most)
        file = FOLDER / f"device-{device + 1}.npz"
        np.savez(file, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
        print(f"data/{file.name}: {len(y_train)} images to train on, {len(y_test)} to test with")


if __name__ == "__main__":
    main()
