"""The `[defence]` block of trainings and scenarios."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer

from mycelia.attacks import PGD, Untargeted, as_model
from mycelia.attacks.defences import OVERFITTING, PGDAT, TRAINING, FastAT, FreeAT, build
from mycelia.attacks.defences.fast_at import OverfittingGuard
from mycelia.attacks.defences.from_config import defence_of, prepare, resume, train
from mycelia.attacks.defences.local import LOCAL, LocalDefence
from mycelia.attacks.defences.train_config import DefendedTrainConfig
from mycelia.cli.main import app, run_command
from mycelia.engine.algorithms import FedAvg, Message
from mycelia.engine.algorithms.model import model_terms
from mycelia.engine.config import Named, load_config
from mycelia.engine.data import Examples, load
from mycelia.engine.errors import ConfigError, DataError, RoundAborted
from mycelia.engine.local import ClientData, LocalResult, LocalTrainer, LocalWork
from mycelia.engine.run import Run
from mycelia.engine.schema import model_sha256
from mycelia.engine.sums import Update
from mycelia.engine.trained import of_run
from mycelia.engine.training import FitResult
from mycelia.privacy.client_steps import PrivateSteps
from mycelia.simulations import Scenario, simulate
from mycelia.simulations import resume as resume_federation
from tests.attacks.training_worlds import examples, linear, normalised

EPS = 0.15
SMALL = {"model": {"name": "mlp", "hidden": [16]}, "batch_size": 64, "plan": "eager"}
PRIVACY = {"unit": "example", "epsilon": 3.0, "delta": 1e-5, "clip": {"name": "abadi", "bound": 1.0}}
FEDERATION = {
    "model": {"name": "mlp", "hidden": [16]}, "data": "digits", "backend": "inline", "plan": "eager",
    "population": {"clients": 4}, "cohort": 2, "rounds": 2, "local": {"steps": 4, "lr": 0.2},
}  # fmt: skip
PGD_BLOCK = {"name": "pgdat", "eps": EPS, "steps": 3}


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MYCELIA_DATA", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mycelia(*arguments: str) -> int:
    return run_command(typer.main.get_command(app()), arguments)


def config(**changes: Any) -> DefendedTrainConfig:
    return load_config(DefendedTrainConfig, SMALL | {"steps": 6} | changes)


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(DefendedTrainConfig, SMALL, overrides)
    return str(caught.value)


def accuracy_under_pgd(run: Path) -> tuple[float, float]:
    """Clean, and under an attack with more steps than training saw."""
    test = load("digits").test
    x, y = torch.from_numpy(test.inputs), torch.from_numpy(test.targets)
    model = as_model(of_run(run).module)
    attack = PGD(steps=20)
    counts = attack.run(model, x, Untargeted(y), eps=EPS, rng=0).counts
    return float((model(x).argmax(1) == y).double().mean()), counts.held / len(x)


# --- mycelia train ----------------------------------------------------------------------------------


def test_a_model_that_trained_on_attacked_inputs_holds_more() -> None:
    common = ["-s", "model.hidden=[64]", "-s", "epochs=8", "-s", "optimizer.lr=0.005", "-s", "plan=eager"]
    defended = ["-s", f'defence={{name="pgdat", norm="linf", eps={EPS}, steps=4}}']
    assert mycelia("train", *common, "--out", "plain") == 0
    assert mycelia("train", *common, *defended, "--out", "robust") == 0
    clean, held = accuracy_under_pgd(Path("plain"))
    clean_too, held_too = accuracy_under_pgd(Path("robust"))
    assert clean > 0.9
    assert clean_too > 0.8
    assert held_too > held + 0.3


def test_reports_show_the_block(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["-s", "model.hidden=[8]", "-s", "steps=2", "-s", "plan=eager"]
    assert mycelia("train", *settings, "-s", "defence=pgdat", "-s", "defence.eps=0.125", "--out", "run") == 0
    assert mycelia("report", "run", "--format", "json") == 0
    capsys.readouterr()
    facts = json.loads(Path("run/report.json").read_text())
    assert facts["setting"]["config"]["defence"] == {"name": "pgdat", "eps": 0.125}
    page = Path("run/report.html").read_text()
    assert "[defence]" in page
    assert "0.125" in page
    assert mycelia("train", *settings, "-s", "defence=trades", "--dry-run", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["defence"].startswith("TRADES(beta=6.0, eps=0.0313")


@pytest.mark.parametrize("name", sorted(TRAINING))
def test_every_name_trains_and_resumes(name: str) -> None:
    """A resumed run ends with the bits of one that was never stopped."""
    asked = config(defence=name)
    whole = train(asked)
    assert whole.steps == 6
    assert sha256(whole) != plain_sha256()

    def stop_after_4(event: object) -> None:
        if getattr(event, "step", 0) == 4 and type(event).__name__ == "CheckpointSaved":
            raise KeyboardInterrupt

    saving = config(defence=name, checkpoint={"steps": 2})
    with pytest.raises(KeyboardInterrupt):
        train(saving, out=Path("run"), listeners=[stop_after_4])
    result = resume(Path("run"))
    assert sha256(result) == sha256(whole)


@cache
def plain_sha256() -> str:
    return sha256(train(config()))


def sha256(result: FitResult) -> str:
    return model_sha256({**result.params, **result.buffers})


def test_another_block_does_not_go_on() -> None:
    train(config(defence=PGD_BLOCK), out=Path("run"))
    text = Path("run/config.toml").read_text()
    Path("run/config.toml").write_text(text.replace("0.15", "0.25"))
    with pytest.raises((ConfigError, DataError), match="defence"):
        resume(Path("run"))


def test_without_a_block_training_is_what_it_was() -> None:
    from mycelia.engine.training import train as train_plainly

    assert plain_sha256() == sha256(train_plainly(config()))
    assert defence_of(prepare(config())) is None
    assert defence_of(prepare(config(defence=PGD_BLOCK))) == PGDAT(eps=EPS, steps=3)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["defence=pgdta"], ["defence.name: no defence is called 'pgdta'", "'pgdat'", "trades"]),
        (["defence={name='pgdat', epss=0.1}"], ["'epss'", "'eps'", "norm, steps, step_size, bounds"]),
        (["defence={eps=0.1}"], ["defence.name: missing"]),
        (["defence={name='pgdat', eps='big'}"], ["defence.eps: 'big'", "number"]),
        (["defence={name='pgdat', eps='8/0'}"], ["defence.eps: '8/0'", "fraction like 8/255"]),
        (["defence={name='pgdat', eps=-0.1}"], ["eps -0.1"]),
        (["defence={name='pgdat', steps=2.5}"], ["defence.steps: 2.5", "integer"]),
        (["defence={name='pgdat', steps=true}"], ["defence.steps: True", "integer"]),
        (["defence={name='pgdat', steps=0}"], ["steps"]),
        (["defence={name='pgdat', norm='linff'}"], ["defence.norm: 'linff'", "'linf'"]),
        (["defence={name='trades', beta=-1}"], ["beta -1"]),
        (["defence={name='freeat', times=0}"], ["times 0"]),
        (["defence={name='nad', replace_ratio=1.5}"], ["replace_ratio 1.5", "[0, 1]"]),
        (["defence={name='fastat', held_out=1.0}"], ["held_out 1.0", "share"]),
    ],
)
def test_settings_that_are_wrong(overrides: list[str], words: list[str]) -> None:
    message = refused(*overrides)
    for word in words:
        assert word in message


def test_no_private_training_on_attacked_inputs() -> None:
    with pytest.raises(ConfigError, match=r"take out \[defence\] or \[privacy\]"):
        config(defence="pgdat", privacy=PRIVACY)


def test_options_are_read_as_toml_says_them() -> None:
    found = build("pgdat", eps="8/255", bounds=[-1, 1], step_size=1)
    assert found == PGDAT(eps=8 / 255, bounds=(-1.0, 1.0), step_size=1.0)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"defence": {"name": "pgdat", "bounds": [0.25, 1]}}, DataError, "beyond bounds 0.25 to 1"),
        ({"data": "diabetes", "loss": "mse", "defence": "pgdat"}, ConfigError, "has no classes"),
    ],
)
def test_what_cannot_be_attacked_leaves_no_folder(changes: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        train(config(**changes), out=Path("run"))
    assert not Path("run").exists()


# --- held-out examples ------------------------------------------------------------------------------


def test_fast_training_holds_out_a_share_by_the_seed() -> None:
    data = examples(57)
    defence, rows = FastAT(held_out=0.2).start(data, 3)
    assert isinstance(defence, FastAT)
    assert isinstance(defence.held_out, Examples)
    taken = np.setdiff1d(np.arange(57), rows)
    assert len(taken) == 12  # a fifth, rounded up
    assert len(rows) == 45
    assert np.array_equal(defence.held_out.inputs, data.inputs[taken])
    assert np.array_equal(defence.held_out.targets, data.targets[taken])
    again, other = FastAT(held_out=0.2).start(data, 3), FastAT(held_out=0.2).start(data, 4)
    assert np.array_equal(rows, again[1])
    assert defence.describe() == again[0].describe()
    assert not np.array_equal(rows, other[1])
    many = Examples(np.zeros((12_000, 1), np.float32), np.zeros(12_000, np.int64))
    assert len(FastAT(held_out=0.5).start(many, 0)[1]) == 11_000  # never more than 1,000
    given = FastAT(data)
    assert given.start(many, 0)[0] is given
    assert len(given.start(many, 0)[1]) == 12_000
    with pytest.raises(DataError, match="left to train on"):
        FastAT(held_out=0.9).start(data.take([0]), 0)
    with pytest.raises(ConfigError, match="measures on examples"):
        OverfittingGuard(FastAT(), 0)


def test_fast_training_never_sees_what_it_holds_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    craft = FastAT.craft

    def watched(self: FastAT, batch: Any) -> Any:
        if len(batch.rows) > 2:  # not the trial
            seen.update(batch.rows.tolist())
        return craft(self, batch)

    monkeypatch.setattr(FastAT, "craft", watched)
    result = train(config(steps=0, epochs=1, defence={"name": "fastat", "check_each": 20}, seed=5))
    n = len(load("digits").train)
    kept = FastAT().start(load("digits").train, 5)[1]
    assert seen == set(kept.tolist())
    assert result.steps == -(-n // 64)


def test_fast_training_stops_where_it_overfits(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([(80, 80), (85, 85), (1, 90)])

    def look(self: OverfittingGuard, model: object, step: int, device: object) -> None:
        pgd, fgsm = next(counts)
        self.judge({"pgd": pgd, "fgsm": fgsm})

    monkeypatch.setattr(OverfittingGuard, "look", look)
    assert mycelia("train", "-s", "steps=9", "-s", "plan=eager", "-s", "defence=fastat", "--out", "run") == 0
    result = Run.open(Path("run")).events()
    finished = [event for event in result if type(event).__name__ == "RunFinished"]
    assert finished[-1].result["stopped_by"] == OVERFITTING  # type: ignore[attr-defined]
    assert finished[-1].result["steps"] == 3  # type: ignore[attr-defined]


# --- clients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [linear, normalised])
def test_clients_without_a_change_train_as_ever(make: Any) -> None:
    data = examples(20)
    client = ClientData(data.inputs, data.targets, np.arange(20), 3)
    ends = []
    for block in (None, {"name": "pgdat", "eps": 0.0}, PGD_BLOCK):
        program = make()
        change = None if block is None else LocalDefence(Named.model_validate(block))
        trainer = LocalTrainer(program, LocalWork(batch_size=6), seed=1, plan="eager", change_of=change)
        params, buffers = program.init()
        ends.append(trainer.run(program.flatten(params), buffers, client, 2).vector.clone())
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_a_client_attacks_its_model_as_it_is_at_each_step() -> None:
    """Against a plain loop over the batches that the trainer draws: the best corner, then an SGD step."""
    program, data = linear(), examples(12)
    client = ClientData(data.inputs, data.targets % 2, np.arange(12), 0)
    params, buffers = program.init()
    params["weight"][2], params["bias"][2] = 0.0, -1e4  # two classes: the best corner has a closed form
    trainer = LocalTrainer(
        program, LocalWork(batch_size=5, lr=0.3), seed=1, plan="eager",
        change_of=LocalDefence(Named.model_validate({"name": "pgdat", "eps": 0.1, "steps": 10})),
    )  # fmt: skip
    found = trainer.run(program.flatten(params), buffers, client, 0).vector
    weight, bias = (params[name].clone().requires_grad_() for name in ("weight", "bias"))
    for inputs, y in trainer._batches(client, 0):
        with torch.no_grad():
            x = (inputs + 0.1 * (weight[1 - y] - weight[y]).sign()).clamp(0, 1)
        loss = torch.nn.functional.cross_entropy(x @ weight.T + bias, y)
        grads = torch.autograd.grad(loss, [weight, bias])
        with torch.no_grad():
            weight -= 0.3 * grads[0]
            bias -= 0.3 * grads[1]
    expected = program.flatten({"weight": weight.detach(), "bias": bias.detach()})
    torch.testing.assert_close(found, expected)


def test_a_federation_trains_on_attacked_inputs() -> None:
    long = FEDERATION | {"rounds": 25, "cohort": 4, "local": {"epochs": 1, "batch_size": 40, "lr": 0.7}}
    long |= {"model": {"name": "mlp", "hidden": [32]}, "evaluation": {"every": 0, "clients": 0}}
    simulate(long, out=Path("plain"))
    simulate(long | {"defence": PGD_BLOCK | {"steps": 2}}, out=Path("robust"))
    _, held = accuracy_under_pgd(Path("plain"))
    clean, held_too = accuracy_under_pgd(Path("robust"))
    assert clean > 0.7
    assert held_too > held + 0.2


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "scaffold"},
        {"secure_sum": {}, "cohort": 4},
        {
            "algorithm": {"name": "fedprox", "mu": 0.1, "weighting": "uniform"},
            "privacy": PRIVACY | {"unit": "client", "delta": 1e-3, "epsilon": 8.0},
        },
    ],
    ids=["scaffold", "secure sum", "client privacy"],
)
def test_the_block_goes_with_what_happens_to_updates(changes: dict[str, Any]) -> None:
    asked = FEDERATION | changes
    assert simulate(asked | {"defence": PGD_BLOCK}).model_sha256 != simulate(asked).model_sha256


def test_federations_end_alike_in_other_processes_and_when_resumed() -> None:
    asked = FEDERATION | {"defence": PGD_BLOCK}
    whole = simulate(asked)
    assert simulate(asked | {"backend": {"name": "workers", "workers": 1}}).model_sha256 == whole.model_sha256
    assert simulate(asked | {"plan": "interpreter"}).model_sha256 == whole.model_sha256
    assert simulate(FEDERATION).model_sha256 != whole.model_sha256

    def stop(event: object) -> None:
        if type(event).__name__ == "CheckpointSaved":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(asked, out=Path("run"), listeners=[stop])
    assert resume_federation(Path("run")).model_sha256 == whole.model_sha256


@dataclass(frozen=True)
class Still(FedAvg):
    """Clients that send the model back."""

    def local(self, trainer: LocalTrainer, message: Message, data: ClientData, state: Any) -> Any:
        result = LocalResult(message.vector.clone(), message.buffers, 0, 0.0, 0)
        return Update(model_terms(trainer.program, message, result, 1.0), {}), state


def test_an_algorithm_that_trains_by_itself_is_not_said_to_be_defended() -> None:
    asked = FEDERATION | {"algorithm": "tests.attacks.test_defence_config:Still"}
    simulate(asked)
    with pytest.raises(RoundAborted, match="trained by itself"):
        simulate(asked | {"defence": PGD_BLOCK})


def test_through_flower_the_model_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    from tests.simulations.test_flower import TaskIdentity, in_process

    for name in ("run_id", "task_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    asked = load_config(Scenario, FEDERATION | {"defence": PGD_BLOCK})
    assert in_process(asked, tmp_path / "flower").model_sha256 == simulate(asked).model_sha256


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"defence": "trades"}, "trades needs a step of its own.*nad, pad or pgdat"),
        ({"defence": "freeat"}, "freeat needs a step"),
        ({"defence": "fastat"}, "fastat needs a step"),
        ({"defence": "pgdta"}, "did you mean 'pgdat'"),
        ({"defence": {"name": "pgdat", "epss": 1}}, "did you mean 'eps'"),
        ({"defence": "pgdat", "algorithm": {"name": "scaffold", "option": "I"}}, "use II"),
        ({"defence": "pgdat", "privacy": PRIVACY}, r"take out \[defence\] or \[privacy\]"),
    ],
)
def test_scenarios_that_are_wrong(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(Scenario, FEDERATION | changes)


def test_what_clients_cannot_attack_is_known_before_the_first_round() -> None:
    with pytest.raises(DataError, match="beyond bounds"):
        simulate(FEDERATION | {"defence": {"name": "pad", "bounds": [0.25, 1.0]}}, out=Path("run"))
    assert not Path("run").exists()


def test_private_steps_take_no_changes() -> None:
    with pytest.raises(ConfigError, match="draw their own batches"):
        LocalTrainer(
            linear(),
            LocalWork(),
            steps_of=PrivateSteps.__call__,
            change_of=LocalDefence(Named(name="nad")),  # type: ignore[arg-type]
        )


def test_local_defences_are_ordinary_steps() -> None:
    """Those that are left out bring a step, a guard or replays of their own."""
    for name, make in TRAINING.items():
        defence = make()
        own = type(defence).step_of, type(defence).guard, type(defence).replays
        base = PGDAT.step_of, PGDAT.guard, PGDAT.replays
        assert (own == base) == (name in LOCAL), name
    assert FreeAT().replays > 1
