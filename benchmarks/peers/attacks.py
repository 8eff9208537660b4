"""The peers' side of `benchmarks/attacks.py`, in an environment of their own: prints one JSON object."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def torchattacks_of(case: str, model: nn.Module, eps: float) -> Any:
    import torchattacks

    found = {
        "pgd": lambda: torchattacks.PGD(model, eps=eps, alpha=eps / 4, steps=40),
        "cw": lambda: torchattacks.CW(model, c=1, steps=200),
        "autoattack": lambda: torchattacks.AutoAttack(
            model, norm="Linf", eps=eps, version="standard", n_classes=10, seed=0
        ),
    }.get(case)
    return found() if found else None


def foolbox_of(case: str) -> Any:
    import foolbox

    found = {
        "pgd": lambda: foolbox.attacks.LinfPGD(abs_stepsize=None, rel_stepsize=0.25, steps=40),
        "cw": lambda: foolbox.attacks.L2CarliniWagnerAttack(binary_search_steps=6, steps=200),
        "hsj": lambda: foolbox.attacks.HopSkipJumpAttack(steps=20),
    }.get(case)
    return found() if found else None


def art_of(case: str, model: nn.Module, eps: float) -> Any:
    from art.attacks.evasion import CarliniL2Method, HopSkipJump, ProjectedGradientDescentPyTorch
    from art.estimators.classification import PyTorchClassifier

    target = PyTorchClassifier(model, nn.CrossEntropyLoss(), (1, 28, 28), 10, clip_values=(0.0, 1.0))
    found = {
        "pgd": lambda: ProjectedGradientDescentPyTorch(
            target, eps=eps, eps_step=eps / 4, max_iter=40, num_random_init=1, batch_size=256, verbose=False
        ),
        "cw": lambda: CarliniL2Method(
            target, max_iter=200, binary_search_steps=6, batch_size=32, verbose=False
        ),
        "hsj": lambda: HopSkipJump(target, norm=2, max_iter=20, max_eval=1000, init_eval=10, verbose=False),
    }.get(case)
    return found() if found else None


def main() -> None:
    peer, case, folder, eps = sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - ART draws from it
    model: nn.Module = torch.load(folder / "model.pt", weights_only=False).eval()
    data = torch.load(folder / "data.pt")
    x, y = data["x"], data["y"]
    queries = 0

    def count(module: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
        nonlocal queries
        queries += len(given[0])

    if peer == "foolbox":
        import foolbox

        attack, target = foolbox_of(case), foolbox.PyTorchModel(model, bounds=(0, 1))
        began_with = (
            (lambda: attack(target, x, y, epsilons=eps if case == "pgd" else None)[1]) if attack else None
        )
    elif peer == "art":
        attack = art_of(case, model, eps)
        began_with = (lambda: torch.from_numpy(attack.generate(x.numpy(), y.numpy()))) if attack else None
    else:
        attack = torchattacks_of(case, model, eps)
        began_with = (lambda: attack(x, y)) if attack else None
    if began_with is None:
        print(json.dumps(None))
        return
    handle = model.register_forward_hook(count)
    began = time.perf_counter()
    found = began_with()
    seconds = time.perf_counter() - began
    handle.remove()
    with torch.no_grad():
        clean, after = model(x).argmax(1) == y, model(found).argmax(1) == y
    distance = (found - x).flatten(1).norm(dim=1)
    broken = clean & ~after
    inside = (found - x).abs().flatten(1).amax(1) <= eps + 1e-6
    print(
        json.dumps(
            {
                "seconds": seconds,
                "queries_per_row": queries / len(x),
                "clean": int(clean.sum()),
                "broken": broken.tolist(),
                "robust": int((clean & after).sum()),
                "outside_ball": None if case in ("cw", "hsj") else int((~inside & broken).sum()),
                "mean_l2": float(distance[broken].mean()) if bool(broken.any()) else None,
                "median_l2": float(distance[broken].median()) if bool(broken.any()) else None,
            }
        )
    )


if __name__ == "__main__":
    main()
