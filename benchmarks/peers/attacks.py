"""The peers' side of `benchmarks/attacks.py`, in an environment of their own: prints one JSON object."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Run = Callable[[Tensor, Tensor], Tensor]


def torchattacks_of(case: str, model: nn.Module, eps: float, batch: int, *, shipped: bool) -> Run | None:
    """As shipped, its AutoAttack takes 10 steps where the paper's takes 100; `standard` sets these."""
    import torchattacks

    def standard() -> Any:
        found = torchattacks.AutoAttack(model, norm="Linf", eps=eps, version="standard", n_classes=10, seed=0)
        for each in found._autoattack.attacks:
            if not shipped and hasattr(each, "steps"):
                each.steps = 100
        return found

    makers: dict[str, Callable[[], Any]] = {
        "pgd": lambda: torchattacks.PGD(model, eps=eps, alpha=eps / 4, steps=40),
        "cw-one": lambda: torchattacks.CW(model, c=1, steps=200),
        "autoattack": standard,
    }
    if case not in makers or (shipped and case != "autoattack"):
        return None
    attack = makers[case]()

    def run(x: Tensor, y: Tensor) -> Tensor:
        parts = zip(x.split(batch), y.split(batch), strict=True)
        return torch.cat([attack(some, labels) for some, labels in parts])

    return run


class _Single(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def foolbox_of(case: str, model: nn.Module, eps: float) -> Run | None:
    import foolbox

    makers: dict[str, Callable[[], Any]] = {
        "pgd": lambda: foolbox.attacks.LinfPGD(abs_stepsize=None, rel_stepsize=0.25, steps=40),
        "cw": lambda: foolbox.attacks.L2CarliniWagnerAttack(binary_search_steps=6, steps=200),
        "hsj": lambda: foolbox.attacks.HopSkipJumpAttack(steps=20),
    }
    if case not in makers:
        return None
    attack, target = makers[case](), foolbox.PyTorchModel(model, bounds=(0, 1))
    return lambda x, y: attack(target, x, y, epsilons=eps if case == "pgd" else None)[1]  # type: ignore[no-any-return]


def art_of(case: str, model: nn.Module, eps: float, batch: int) -> Run | None:
    from art.attacks.evasion import CarliniL2Method, HopSkipJump, ProjectedGradientDescentPyTorch
    from art.estimators.classification import PyTorchClassifier

    single = nn.Sequential(_Single(), model)  # its HopSkipJump asks in double precision
    target = PyTorchClassifier(single, nn.CrossEntropyLoss(), (1, 28, 28), 10, clip_values=(0.0, 1.0))
    makers: dict[str, Callable[[], Any]] = {
        "pgd": lambda: ProjectedGradientDescentPyTorch(
            target, eps=eps, eps_step=eps / 4, max_iter=40, num_random_init=1, batch_size=batch, verbose=False
        ),
        "cw": lambda: CarliniL2Method(
            target, max_iter=200, binary_search_steps=6, batch_size=batch, verbose=False
        ),
        "hsj": lambda: HopSkipJump(target, norm=2, max_iter=20, verbose=False),
    }
    if case not in makers:
        return None
    attack = makers[case]()
    return lambda x, y: torch.from_numpy(attack.generate(x.numpy(), y.numpy())).float()


def main() -> None:
    peer, case, folder, eps, batch = (
        sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]),
    )  # fmt: skip
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - ART draws from it
    model: nn.Module = torch.load(folder / "model.pt", weights_only=False).eval()
    data = torch.load(folder / "data.pt")
    x, y = data["x"], data["y"]
    run = {
        "foolbox": lambda: foolbox_of(case, model, eps),
        "art": lambda: art_of(case, model, eps, batch),
        "torchattacks": lambda: torchattacks_of(case, model, eps, batch, shipped=False),
        "torchattacks_shipped": lambda: torchattacks_of(case, model, eps, batch, shipped=True),
    }[peer]()
    if run is None:
        print(json.dumps(None))
        return
    queries = 0

    def count(module: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
        nonlocal queries
        queries += len(given[0])

    handle = model.register_forward_hook(count)
    began = time.perf_counter()
    found = run(x, y)
    seconds = time.perf_counter() - began
    handle.remove()
    with torch.no_grad():
        clean, after = model(x).argmax(1) == y, model(found).argmax(1) == y
    distance = (found - x).flatten(1).norm(dim=1)
    broken = clean & ~after
    inside = (found - x).abs().flatten(1).amax(1) <= eps + 1e-6
    fixed = case in ("pgd", "autoattack")
    print(
        json.dumps(
            {
                "seconds": seconds,
                "queries_per_row": queries / len(x) if queries else None,  # ART calls a copy
                "clean": int(clean.sum()),
                "broken": broken.tolist(),
                "robust": int((clean & after).sum()),
                "outside_ball": int((~inside & broken).sum()) if fixed else None,
                "l2": distance.tolist(),
            }
        )
    )


if __name__ == "__main__":
    main()
