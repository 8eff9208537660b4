"""A model in an ONNX file answers as the arithmetic in it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from mycelia.attacks import PGD, HopSkipJump, Status, Untargeted
from mycelia.attacks.onnx_model import onnx_model
from mycelia.engine.errors import ConfigError, DataError

W = np.array([[3.0, -4.0], [-3.0, 4.0]], np.float32)
B = np.array([1.0, -1.0], np.float32)


def written(path: Path, batch: int | str = "n") -> Path:
    """x ↦ x Wᵀ + b."""
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["z"], transB=1)],
        "affine",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 2])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [batch, 2])],
        [numpy_helper.from_array(W, "w"), numpy_helper.from_array(B, "b")],
    )
    return saved(graph, path)


def saved(graph: onnx.GraphProto, path: Path) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("batch", ["n", 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores(tmp_path: Path, batch: int | str, dtype: torch.dtype) -> None:
    x = torch.rand(10, 2, dtype=dtype)
    found = onnx_model(written(tmp_path / "m.onnx", batch))(x)
    expected = x.float() @ torch.from_numpy(W).T + torch.from_numpy(B)
    assert torch.allclose(found, expected, atol=1e-6)


def test_a_decision_attack_finds_its_boundary(tmp_path: Path) -> None:
    """|2 (w · x + b)| / |2 w| from (2, 1) is 3 / 5."""
    model = onnx_model(written(tmp_path / "m.onnx"))
    x = torch.tensor([[2.0, 1.0]])
    found = HopSkipJump(norm="l2").run(model, x, Untargeted(torch.tensor([0])), rng=1, bounds=(-5.0, 5.0))
    assert found.status.tolist() == [Status.BROKEN]
    assert float(found.distance["l2"]) == pytest.approx(0.6, rel=0.02)
    with pytest.raises(ConfigError, match="hopskipjump"):
        PGD().run(model, x, Untargeted(torch.tensor([0])), eps=0.1, bounds=(-5.0, 5.0))


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"\x08")
    with pytest.raises(DataError, match="cannot be read"):
        onnx_model(tmp_path / "broken.onnx")
    with pytest.raises(DataError, match="cannot be read"):
        onnx_model(tmp_path / "missing.onnx")
    x, z = (helper.make_tensor_value_info(name, TensorProto.INT64, ["n"]) for name in ("x", "z"))
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["z"])], "tokens", [x], [z])
    with pytest.raises(DataError, match="int64"):
        onnx_model(saved(graph, tmp_path / "m.onnx"))
