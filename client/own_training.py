"""A user's own training function in the place of Mycelia's local steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import Tensor

from mycelia.aggregator.wire.settings import TaskSettings
from mycelia.engine.algorithms import Algorithm, Message
from mycelia.engine.algorithms.model import client_weight, model_terms
from mycelia.engine.data import Examples
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.local import LocalResult
from mycelia.engine.plugins import user_code
from mycelia.engine.program import Program
from mycelia.engine.schema import Role
from mycelia.engine.sums import Update
from mycelia.engine.types import Tensors

__all__ = ["OwnTrain", "check_own", "train_own"]

OwnTrain = Callable[
    [Tensors, Tensors, Examples, TaskSettings, int], tuple[Mapping[str, Tensor], int, Mapping[str, float]]
]
"""Called with copies of the parameters and of the buffers by name, the device's training examples, the task's
settings and the round; gives the new tensors by name (those left out stay as they were), the number of
examples it trained on, and numbers for the report: `loss_sum` and `steps` are summed, others are kept."""

_MODEL_TERMS: Final = {"params", "buffers", "counters"}
_WHO: Final = "the device's own train function"


def check_own(program: Program, algorithm: Algorithm, settings: TaskSettings) -> None:
    """Refuse what only Mycelia's own steps can do.

    Raises:
        ConfigError: an algorithm with other local steps than SGD, or a state; or steps that are private.
    """
    privacy = settings.privacy
    if not algorithm.sends_model or not algorithm.terms(program).keys() <= _MODEL_TERMS:
        found = f"the algorithm {algorithm.name}, which sends more than a model"
    elif algorithm.stateful or algorithm.adjust(program) is not None:
        found = f"the algorithm {algorithm.name}, which has local steps of its own"
    elif privacy is not None and privacy.unit == "example":
        found = "noise in the local steps"
    else:
        return
    raise ConfigError(
        found,
        rule="a function of the device's own trains where a model is all that is asked for",
        fix="leave train out on this device, or use fedavg on the server",
        who=_WHO,
    )


def train_own(
    train: OwnTrain,
    program: Program,
    algorithm: Algorithm,
    settings: TaskSettings,
    message: Message,
    examples: Examples,
) -> tuple[Update, Tensors]:
    """The update that the function's model comes to, and the model.

    Raises:
        DataError: what it returned is not as it has to be.
    """
    params = {name: tensor.clone() for name, tensor in program.unflatten(message.vector).items()}
    buffers = {name: tensor.clone() for name, tensor in message.buffers.items()}
    with user_code(_WHO):
        found: Any = train(params, buffers, examples, settings, message.round)
    if not isinstance(found, tuple) or len(found) != 3 or not isinstance(found[0], Mapping):
        raise _wrong(f"it returned a {type(found).__name__}", "(tensors by name, examples, numbers by name)")
    tensors, count, numbers = found
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise _wrong(f"it trained on {count!r} examples", "a whole number from 1")
    metrics = {str(name): float(value) for name, value in dict(numbers).items()}
    before = program.unflatten(message.vector) | message.buffers
    new = {
        name: tensor.detach() if isinstance(tensor, Tensor) else tensor for name, tensor in tensors.items()
    }
    if wrong := next((name for name, tensor in new.items() if not isinstance(tensor, Tensor)), ""):
        raise _wrong(f"{wrong} is a {type(new[wrong]).__name__}", "tensors")
    whole = {**before, **new}
    program.schema.check(whole, Role.PARAMETER, Role.BUFFER, Role.COUNTER, who=_WHO)
    owned = {name: tensor.cpu().contiguous().clone() for name, tensor in whole.items()}
    steps = int(metrics.get("steps", 1))
    result = LocalResult(
        program.flatten({name: owned[name] for name in params}).clone(),
        {name: owned[name] for name in buffers},
        steps, metrics.get("loss_sum", 0.0), count,
    )  # fmt: skip
    weight = client_weight(str(getattr(algorithm, "weighting", "examples")), count)
    terms = model_terms(program, message, result, weight)
    sums = {"loss_sum": result.loss_sum, "examples": float(count), "steps": float(steps)}
    return Update(terms, metrics | sums), owned


def _wrong(found: str, rule: str) -> DataError:
    return DataError(found, rule=rule, who=_WHO)
