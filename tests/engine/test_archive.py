"""A saved Program computes the same, and what was tampered with is refused."""

import functools
import json
import pickle
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mycelia.engine import archive, structure
from mycelia.engine.capture import capture
from mycelia.engine.errors import CaptureError, ConfigError, DataError
from mycelia.engine.graph import Pass, source_line
from mycelia.engine.program import Program
from tests.engine.zoo import ZOO, captured

torch.set_num_threads(1)

# one of each kind of graph; the others run with the long schedules
QUICK = {
    "lenet",
    "resnet8-batch",
    "dropout",
    "gru-deep",
    "tied-head",
    "lora",
    "custom-operator",
    "dictionary",
    "cond",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "lenet"
    captured("lenet").save(path)
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy to tamper with."""
    target = tmp_path / "copy"
    target.mkdir()
    for file in saved.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def rewrite(path: Path, **changes: object) -> None:
    """Change program.json, and the hashes of the other files to what they are now."""
    content = json.loads((path / "program.json").read_text())
    content["sha256"] = {name: sha256((path / name).read_bytes()).hexdigest() for name in content["sha256"]}
    (path / "program.json").write_text(json.dumps(content | changes))


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]
)
def test_a_loaded_program_computes_the_same(name: str, tmp_path: Path) -> None:
    case, program = ZOO[name], captured(name)
    program.save(tmp_path / name)
    loaded = Program.load(tmp_path / name)
    assert loaded.schema == program.schema
    assert loaded.note == program.note
    params, buffers = program.init()
    for mine, theirs in zip(loaded.init(), (params, buffers), strict=True):
        assert list(mine) == list(theirs)
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    leaves = {key: tensor.requires_grad_() for key, tensor in params.items()}
    for size in (1, 5):
        batch = case.batch(size)
        for training in (True, False):
            one, two = (
                p.forward(leaves, buffers, *batch, seed=4, first=2, training=training)
                for p in (program, loaded)
            )
            assert torch.equal(one.losses, two.losses)
            assert all(torch.equal(one.buffers[key], two.buffers[key]) for key in buffers)
            for mine, theirs in zip(*(structure.flatten(f.outputs)[0] for f in (one, two)), strict=True):
                assert torch.equal(mine, theirs)
            grads = [
                torch.autograd.grad(f.losses.mean(), list(leaves.values()), allow_unused=True)
                for f in (one, two)
            ]
            for mine, theirs in zip(*grads, strict=True):
                assert mine is theirs is None or torch.equal(mine, theirs)
        plain = {key: tensor.detach() for key, tensor in leaves.items()}
        outputs = [structure.flatten(p.predict(plain, buffers, batch[0]))[0] for p in (program, loaded)]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*outputs, strict=True))


def test_source_lines_survive(saved: Path) -> None:
    loaded = Program.load(saved)
    lines = [source_line(node) for node in loaded.graph("test").graph.nodes if "conv2d" in str(node.target)]
    assert len(lines) == 2
    assert lines[0].startswith("0 ")
    assert "conv.py" in lines[0]


def test_a_rewritten_program_keeps_its_note(tmp_path: Path) -> None:
    program = captured("mlp").rewrite(Pass("nothing", lambda graph: None))
    program.save(tmp_path / "mlp")
    assert Program.load(tmp_path / "mlp").note == ("nothing",)


def test_what_is_written_holds_no_pickle_and_no_data(saved: Path) -> None:
    case = ZOO["lenet"]
    assert sorted(file.name for file in saved.iterdir()) == [
        *("evaluation.pt2", "program.json", "tensors.safetensors", "training.pt2")
    ]
    for name in ("training.pt2", "evaluation.pt2"):
        archive.check_pt2(saved / name)
        with zipfile.ZipFile(saved / name) as file:
            assert not any(member.endswith(".pkl") for member in file.namelist())
            assert sum(i.file_size for i in file.infolist() if "sample_inputs" in i.filename) == 0
    values = case.batch(2)[0].numpy().tobytes()
    assert not any(values[:64] in file.read_bytes() for file in saved.iterdir()), (
        "the example is somebody's data"
    )
    names = set(load_file(saved / "tensors.safetensors"))
    assert names == {entry.name for entry in captured("lenet").schema}


def test_constants_come_back(tmp_path: Path) -> None:
    weights = torch.tensor([1.0, 3.0])
    program = capture(
        nn.Linear(3, 2),
        lambda o, t: nn.functional.cross_entropy(o, t, weight=weights, reduction="none"),
        (torch.zeros(2, 3), torch.tensor([0, 1])),
    )
    program.save(tmp_path / "weighted")
    loaded = Program.load(tmp_path / "weighted")
    batch = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    assert torch.equal(program.losses(*program.init(), batch), loaded.losses(*program.init(), batch))


def test_a_fixed_batch_stays_fixed(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    example = torch.randn(1, 3), torch.tensor([1])
    program = capture(
        model, lambda o, t: nn.functional.cross_entropy(o, t, reduction="none"), example, dynamic_batch=False
    )
    program.save(tmp_path / "one")
    torch.testing.assert_close(
        Program.load(tmp_path / "one").predict(*program.init(), example[0]), model(example[0])
    )


def test_an_existing_folder_is_not_overwritten(saved: Path, tmp_path: Path) -> None:
    before = (saved / "program.json").read_bytes()
    with pytest.raises(ConfigError, match="exists"):
        captured("mlp").save(saved)
    assert (saved / "program.json").read_bytes() == before
    (tmp_path / "empty").mkdir()
    captured("mlp").save(tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"], "nothing is left beside it"


def test_programs_that_do_not_run_their_graphs_are_not_saved(tmp_path: Path) -> None:
    case = ZOO["mlp"]
    eager = capture(case.module(), case.loss, case.batch(2), backend="eager")
    with pytest.raises(CaptureError, match="save needs a graph"):
        eager.save(tmp_path / "eager")
    program = captured("mlp")
    other = program.with_calls(functools.partial(program.training), program.evaluation, "traced")
    with pytest.raises(CaptureError, match="traced applied does not run its graphs"):
        other.save(tmp_path / "other")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["program.json", "tensors.safetensors", "training.pt2", "evaluation.pt2"])
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(DataError, match=name):
        Program.load(copy)


@pytest.mark.parametrize("name", ["tensors.safetensors", "training.pt2", "evaluation.pt2"])
def test_a_changed_byte_is_refused(copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} is not the file that was saved"):
        Program.load(copy)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 99}, "version: Input should be 1"),
        ({"format": "other"}, "format: Input should be 'mycelia-program'"),
        ({"more": 1}, "more: Extra inputs"),
        ({"schema_sha256": "0" * 64}, "schema is not the one"),
        ({"entries": 3}, "entries: Input should be a valid array"),
        ({"entries": [["x", "parameter", [1], "float99"]]}, "not a schema entry"),
        ({"example": [{"shape": [2, 3], "dtype": "load"}] * 2}, "'load' is no dtype"),
        ({"example": []}, "example: List should have at least 2 items"),
        ({"outputs": {"tensor": 99}}, "outputs"),
        ({"outputs": {"system": []}}, "outputs"),
        ({"outputs": {"tuple": []}}, "outputs of 0 tensors, the graph has 1"),
        ({"note": [3]}, "note"),
    ],
)
def test_a_tampered_json_is_refused(copy: Path, changes: dict[str, object], says: str) -> None:
    rewrite(copy, **changes)
    with pytest.raises(DataError, match=says):
        Program.load(copy)


def test_json_that_is_no_json_is_refused(copy: Path) -> None:
    (copy / "program.json").write_text("{")
    with pytest.raises(DataError, match="Invalid JSON"):
        Program.load(copy)


def test_tensors_of_another_model_are_refused(copy: Path) -> None:
    captured("mlp").save(copy.parent / "mlp")
    (copy / "tensors.safetensors").write_bytes((copy.parent / "mlp" / "tensors.safetensors").read_bytes())
    rewrite(copy)
    with pytest.raises(DataError, match="names must match the schema"):
        Program.load(copy)


class Trap:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def edit(path: Path, **members: bytes) -> None:
    """Replace or add members of a .pt2 file, whose names end as given with _ for / and ."""
    with zipfile.ZipFile(path) as file:
        content = {name: file.read(name) for name in file.namelist()}
    for ending, data in members.items():
        name = next(
            (name for name in content if name.replace("/", "_").replace(".", "_").endswith(ending)), None
        )
        content[name or f"{next(iter(content)).split('/')[0]}/data/constants/{ending}"] = data
    with zipfile.ZipFile(path, "w") as file:
        for name, data in content.items():
            file.writestr(name, data)


def test_a_pickle_in_a_graph_file_is_never_read(copy: Path) -> None:
    touched = copy.parent / "touched"
    trap = pickle.dumps(Trap(touched))
    original = (copy / "training.pt2").read_bytes()
    named = json.dumps(
        {"config": {"x": {"path_name": "tensor_0", "is_param": False, "use_pickle": True}}}
    ).encode()
    for members in (
        {"sample_inputs_model_pt": trap},
        {"opaque_obj_0": trap},
        {"custom_obj_0": trap},
        {"model_pt": trap},
        {"model_constants_config_json": named, "tensor_0": trap},
    ):
        (copy / "training.pt2").write_bytes(original)
        edit(copy / "training.pt2", **members)
        rewrite(copy)
        with pytest.raises(DataError, match=r"unpickled|pickled tensor"):
            Program.load(copy)
        assert not touched.exists()


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').getpid()",
        "Symbol('s0').__class__",
        "exit()",
        "Mul(Integer(2), open('x'))",
        "[x for x in y]",
        "lambda: 1",
        "Symbol('__import__')",
        "s0",
    ],
)
def test_an_expression_that_is_not_arithmetic_is_refused(copy: Path, expression: str) -> None:
    with zipfile.ZipFile(copy / "training.pt2") as file:
        (name,) = (name for name in file.namelist() if name.endswith("models/model.json"))
        text = file.read(name).decode()
    assert '"expr_str": ' in text
    head, tail = text.split('"expr_str": "', 1)
    edit(
        copy / "training.pt2",
        models_model_json=(
            head + '"expr_str": ' + json.dumps(expression) + tail[tail.index('"') + 1 :]
        ).encode(),
    )
    rewrite(copy)
    with pytest.raises(DataError, match="holds the expression"):
        Program.load(copy)


def test_a_graph_that_calls_python_is_refused(copy: Path) -> None:
    """torch's own reader resolves any dotted name under torch."""
    with zipfile.ZipFile(copy / "training.pt2") as file:
        (name,) = (name for name in file.namelist() if name.endswith("models/model.json"))
        text = file.read(name).decode()
    edit(
        copy / "training.pt2",
        models_model_json=text.replace("torch.ops.aten.relu.default", "torch.relu").encode(),
    )
    rewrite(copy)
    with pytest.raises(DataError, match="cannot be read"):
        Program.load(copy)


def test_a_file_that_is_no_zip_is_refused(copy: Path) -> None:
    (copy / "training.pt2").write_bytes(b"PK" + bytes(100))
    rewrite(copy)
    with pytest.raises(DataError, match=r"not a \.pt2 file"):
        Program.load(copy)


def test_a_missing_custom_operator_is_explained(tmp_path: Path) -> None:
    """In a process that does not import the module that registers it."""
    captured("custom-operator").save(tmp_path / "custom")
    code = "import sys; from mycelia.engine.program import Program; Program.load(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "custom"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "registers the model's custom operators" in done.stderr
