"""The Flower client of workload S1, in a module of its own.

Ray ships `__main__` with every call but imports a module once per process, so the cached data and model live
here: each actor reads the data and builds the model once.
"""

from __future__ import annotations

import functools

import torch
import workload
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

app = ClientApp()


@functools.cache
def cached_model(name: str) -> tuple[nn.Module, list[Tensor]]:
    """This process's model and its parameters; training runs on one thread, since there is an actor per core."""
    torch.set_num_threads(1)
    model = workload.build_model(name, 0)
    return model, list(model.parameters())


def task(model: str, seed: int, round_index: int, client: int, clients: int, file_order: bool) -> ConfigRecord:
    """What a message tells a client beside the weights."""
    return ConfigRecord(
        {
            "model": model,
            "seed": seed,
            "round": round_index,
            "client": client,
            "clients": clients,
            "file_order": file_order,
        }
    )


@app.train()
def train(message: Message, context: Context) -> Message:
    """One epoch from the weights received; answers with the trained weights and the number of examples."""
    asked = message.content["config"]
    model, parameters = cached_model(asked["model"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = workload.train_data(asked["clients"])
    images, labels = workload.client_epoch(data, asked["seed"], asked["round"], asked["client"], asked["file_order"])
    workload.train_client(model, parameters, images, labels)
    answer = RecordDict(
        {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(labels)})}
    )
    return Message(answer, reply_to=message)
