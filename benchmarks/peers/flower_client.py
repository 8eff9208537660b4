"""The Flower client of workload S1, in a module of its own.

Ray ships `__main__` with every call but imports a module once per process, so the cached data and model live
here: each actor reads the data and builds the model once.
"""

from __future__ import annotations

import dataclasses
import functools
import json

import torch
import workload
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from measure import Settings
from torch import nn

app = ClientApp()


@functools.cache
def cached_model(name: str) -> tuple[nn.Module, list[nn.Parameter]]:
    """This process's model and its parameters. One thread: there is an actor per core."""
    torch.set_num_threads(1)
    model = workload.build_model(name, 0)
    return model, list(model.parameters())


def describe(settings: Settings, round_index: int, client: int) -> ConfigRecord:
    """What a message tells a client beside the weights."""
    return ConfigRecord({"task": json.dumps([dataclasses.asdict(settings), round_index, client])})


@app.train()
def train(message: Message, context: Context) -> Message:
    """One epoch from the weights received; answers with the trained weights and the number of examples."""
    asked, round_index, client = json.loads(str(message.content.config_records["config"]["task"]))
    settings = Settings(**asked)
    model, parameters = cached_model(settings.model)
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    images, labels = settings.epoch_of(workload.train_data(settings.clients), round_index, client)
    workload.train_client(model, parameters, images, labels)
    answer = RecordDict(
        {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(labels)})}
    )
    return Message(answer, reply_to=message)
