"""Federated algorithms, one file each, both halves in it.

`build` makes one by name. To write one, subclass `Algorithm`; `model_specs`, `model_terms`, `merge_model` and
`local_sgd` are its usual pieces.
"""

from __future__ import annotations

from mycelia.engine.algorithms.base import Algorithm, Message, ServerState
from mycelia.engine.algorithms.centralised import Centralised
from mycelia.engine.algorithms.fedadagrad import FedAdagrad
from mycelia.engine.algorithms.fedadam import FedAdam
from mycelia.engine.algorithms.fedavg import FedAvg
from mycelia.engine.algorithms.fedavgm import FedAvgM
from mycelia.engine.algorithms.fedbn import FedBN
from mycelia.engine.algorithms.fednova import FedNova
from mycelia.engine.algorithms.fedopt import FedOpt
from mycelia.engine.algorithms.fedprox import FedProx
from mycelia.engine.algorithms.fedsgd import FedSGD
from mycelia.engine.algorithms.fedyogi import FedYogi
from mycelia.engine.algorithms.local_only import LocalOnly
from mycelia.engine.algorithms.model import local_sgd, merge_buffers, merge_model, model_specs, model_terms
from mycelia.engine.algorithms.registry import ALGORITHMS, build
from mycelia.engine.algorithms.scaffold import Scaffold

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Centralised",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedNova",
    "FedOpt",
    "FedProx",
    "FedSGD",
    "FedYogi",
    "LocalOnly",
    "Message",
    "Scaffold",
    "ServerState",
    "build",
    "local_sgd",
    "merge_buffers",
    "merge_model",
    "model_specs",
    "model_terms",
]
