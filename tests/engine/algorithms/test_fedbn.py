"""FedBN: what belongs to normalisation is found, stays with the client and is never sent."""

from collections import OrderedDict
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from mycelia.engine.algorithms import FedAvg, FedBN
from mycelia.engine.algorithms.fedbn import norm_tensors
from mycelia.engine.capture import capture
from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.local import LocalWork, parameter_slices
from tests.engine.algorithms.harness import (
    Federation,
    copied,
    cross_entropy,
    net,
    net_clients,
    quadratic,
    same,
)

NORM = {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def federation(algorithm: FedBN | FedAvg, sizes: Sequence[int] = (8, 6, 4)) -> Federation:
    return Federation(algorithm, net(), LocalWork(epochs=2, batch_size=4), net_clients(sizes), plan="eager")


def test_batch_norm_is_found() -> None:
    assert norm_tensors(net()) == NORM


def test_other_normalisations_are_found() -> None:
    model = nn.Sequential(
        OrderedDict(
            group=nn.GroupNorm(1, 3),
            rms=nn.RMSNorm([3, 4, 4]),
            instance=nn.InstanceNorm2d(3, affine=True),
            layer=nn.LayerNorm(4),
            plain=nn.BatchNorm2d(3, affine=False),
            frozen=nn.LayerNorm(4).requires_grad_(False),
            conv=nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 1)),  # of weights, not of activations
            flatten=nn.Flatten(),
            out=nn.Linear(48, 3),
        )
    )
    program = capture(model, cross_entropy, (torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64)))
    scaled = {f"{name}.{part}" for name in ("group", "instance", "layer") for part in ("weight", "bias")}
    statistics = {f"plain.{part}" for part in ("running_mean", "running_var", "num_batches_tracked")}
    assert norm_tensors(program) == scaled | statistics | {"rms.weight"}


def test_norm_tensors_stay_with_the_client() -> None:
    fed = federation(FedBN())
    start = {**fed.program.unflatten(fed.state.vector.clone()), **copied(fed.state.buffers)}
    fed.run(2)
    end = {**fed.program.unflatten(fed.state.vector), **fed.state.buffers}
    assert {name for name in start if torch.equal(start[name], end[name])} == NORM
    for client in range(3):
        own = fed.own[client]
        assert own is not None
        assert set(own) == NORM
        assert not any(torch.equal(own[name], start[name]) for name in NORM)
    assert not same(fed.own[0] or {}, fed.own[1] or {})


def test_nothing_of_them_is_sent() -> None:
    fed = federation(FedBN())
    size = sum(e.numel for e in fed.program.schema if e.name not in NORM and e.role == "parameter")
    assert {name: spec.size for name, spec in fed.algorithm.terms(fed.program).items()} == {"params": size}
    update, _ = fed.update(fed.clients[0])
    assert set(update.terms) == {"params"}
    assert update.terms["params"].values.shape == (size,)


def test_what_is_shared_is_the_weighted_mean() -> None:
    """One round, against the clients' own ends put together by name."""
    fed = federation(FedBN())
    slices = parameter_slices(fed.program)
    ends: list[Tensor] = []
    for client in fed.clients:
        message = fed.message()
        ends.append(fed.trainer.run(message.vector, message.buffers, client, 0).vector.clone())
    fed.round()
    mean = (8 * ends[0] + 6 * ends[1] + 4 * ends[2]) / 18
    for name, part in slices.items():
        if name not in NORM:
            torch.testing.assert_close(fed.state.vector[part], mean[part], rtol=0, atol=1e-9)


def test_personal_model_is_the_shared_one_with_the_clients_norm() -> None:
    fed = federation(FedBN())
    fed.run(2)
    vector, buffers = fed.personal(1)
    own = fed.own[1]
    assert own is not None
    for name, part in parameter_slices(fed.program).items():
        expected = own[name] if name in NORM else fed.state.vector[part]
        assert torch.equal(vector[part], expected)
    assert same(buffers, {name: own[name] for name in buffers})
    assert fed.personal(99)[0] is fed.state.vector  # a client that has not trained


def test_patterns_name_what_is_kept() -> None:
    fed = federation(FedBN(keep=("norm.running_*", "second.bias")))
    fed.round()
    assert set(fed.own[0] or {}) == {"norm.running_mean", "norm.running_var", "second.bias"}
    assert set(fed.form.specs) == {"params", "counters"}
    assert int(fed.state.buffers["norm.num_batches_tracked"]) == round((8 * 4 + 6 * 4 + 4 * 2) / 18)


def test_a_list_from_a_configuration_is_a_tuple() -> None:
    assert FedBN(keep=["a", "b"]) == FedBN(keep=("a", "b"))  # type: ignore[arg-type]


def test_a_model_without_normalisation_is_refused() -> None:
    with pytest.raises(ConfigError, match="no normalisation"):
        FedBN().terms(quadratic())


def test_a_program_without_a_graph_needs_names() -> None:
    program = quadratic(2, torch.float64, "eager")
    with pytest.raises(CaptureError, match="graph"):
        FedBN().terms(program)
    with pytest.raises(ConfigError, match="no parameter is sent"):
        FedBN(keep=("weight",)).terms(program)


def test_a_pattern_without_a_match_is_refused() -> None:
    with pytest.raises(ConfigError, match="'norms"):
        FedBN(keep=("norm.*", "norms.*")).terms(net())


@pytest.mark.parametrize(
    ("option", "value"), [("keep", "norm"), ("keep", [1]), ("server_lr", 0.0), ("weighting", "n")]
)
def test_options_out_of_range(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        FedBN(**{option: value})  # type: ignore[arg-type]
