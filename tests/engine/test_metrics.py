"""Metrics: against scikit-learn, and the same for every way of cutting and ordering the examples."""

import math
from fractions import Fraction
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, roc_auc_score, top_k_accuracy_score

from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.metrics import ExactSum, Metrics

torch.set_num_threads(1)
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def batch(n: int, classes: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(n, classes, generator=generator) * 3
    losses = torch.rand(n, generator=generator) * 10 ** torch.randint(-8, 4, (n,), generator=generator)
    return outputs, losses, torch.randint(0, classes, (n,), generator=generator)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_equals_scikit_learn(classes: int) -> None:
    outputs, losses, targets = batch(400, classes)
    metrics = Metrics(classes=classes, top_k=(1, 2), keep_scores=True).update(outputs, losses, targets)
    result = metrics.result()
    y, predicted, p = targets.numpy(), outputs.argmax(1).numpy(), outputs.double().softmax(1).numpy()
    assert metrics.confusion is not None
    np.testing.assert_array_equal(metrics.confusion, confusion_matrix(y, predicted))
    assert result["accuracy"] == result["top_1_accuracy"] == accuracy_score(y, predicted)
    assert result["macro_f1"] == pytest.approx(f1_score(y, predicted, average="macro"), rel=1e-12)
    area = roc_auc_score(y, p[:, 1]) if classes == 2 else roc_auc_score(y, p, multi_class="ovr")
    assert result["auroc"] == pytest.approx(area, rel=1e-12)
    if classes > 2:
        top = top_k_accuracy_score(y, outputs.numpy(), k=2, labels=range(classes))
        assert result["top_2_accuracy"] == top
    assert Fraction(result["loss"]) == Fraction(float(sum(map(Fraction, losses.tolist()))) / 400)


def test_f1_leaves_out_classes_that_do_not_occur() -> None:
    targets, predicted = torch.tensor([0, 0, 1, 4]), torch.tensor([0, 1, 1, 2])
    outputs = torch.nn.functional.one_hot(predicted, 6).float()
    result = Metrics(classes=6).update(outputs, torch.zeros(4), targets).result()
    assert result["macro_f1"] == pytest.approx(f1_score(targets, predicted, average="macro"))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_and_any_order_of_merging_give_the_same_bits(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 60))
    whole = batch(n, 4, seed=data.draw(st.integers(0, 9)))
    empty = Metrics(classes=4, top_k=(2,), keep_scores=True)
    expected = empty.update(*whole)
    order = torch.tensor(data.draw(st.permutations(range(n))))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=6)))
    chunks = [order[a:b] for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
    parts = [empty.update(*(tensor[chunk] for tensor in whole)) for chunk in chunks]
    merged = reduce(add, data.draw(st.permutations(parts)))
    streamed = reduce(lambda m, chunk: m.update(*(tensor[chunk] for tensor in whole)), chunks, empty)
    # NaN (a class that does not occur has no AUROC) is the same result too.
    assert repr(merged.result()) == repr(streamed.result()) == repr(expected.result())
    assert torch.equal(merged.confusion, expected.confusion)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32)), st.integers(0, 50))
def test_the_sum_is_the_exact_one(values: list[float], cut: int) -> None:
    total = ExactSum().add(values[:cut]) + ExactSum().add(values[cut:])
    assert float(total) == float(sum(map(Fraction, values)))
    assert sum(map(Fraction, total.parts)) == sum(map(Fraction, values))


@pytest.mark.parametrize(
    ("values", "expected"),
    [([math.nan, 1.0], math.nan), ([math.inf, 1.0], math.inf), ([math.inf, -math.inf], math.nan), ([], 0.0)],
)
def test_a_sum_that_is_not_finite_stays_so(values: list[float], expected: float) -> None:
    total = float(ExactSum().add(values) + ExactSum().add([2.0]) + ExactSum())
    assert total == pytest.approx(expected + 2, nan_ok=True)


def test_updates_are_pure() -> None:
    first = Metrics(classes=3).update(*batch(5, 3))
    confusion = first.confusion.clone()  # type: ignore[union-attr]
    first.update(*batch(7, 3, seed=1))
    assert first + first is not first
    assert (first.count, (first + first).count) == (5, 10)
    assert torch.equal(first.confusion, confusion)  # type: ignore[arg-type]


def test_tokens_count_as_predictions_and_sequences_as_examples() -> None:
    targets = torch.tensor([[0, 1, 2], [2, 1, 0]])
    outputs = torch.nn.functional.one_hot(torch.tensor([[0, 1, 1], [2, 1, 0]]), 3).float()
    metrics = Metrics(classes=3, top_k=(3,)).update(outputs, torch.tensor([1.0, 2.0]), targets)
    assert (metrics.count, metrics.predictions) == (2, 6)
    assert metrics.result()["loss"] == 1.5
    assert metrics.result()["accuracy"] == 5 / 6
    maps = Metrics(classes=3).update(outputs.movedim(2, 1)[..., None], torch.zeros(2), targets[..., None])
    assert maps.result()["accuracy"] == 5 / 6


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_one_logit_for_two_classes(shape: tuple[int, ...]) -> None:
    outputs, targets = torch.tensor([-1.0, 2.0, 0.5, -3.0]).reshape(shape), torch.tensor([0, 1, 0, 1])
    result = Metrics(classes=2, keep_scores=True).update(outputs, torch.zeros(4), targets).result()
    assert (result["accuracy"], result["auroc"]) == (0.5, roc_auc_score(targets, outputs.flatten()))


def test_regression_keeps_the_loss() -> None:
    metrics = Metrics().update(torch.zeros(2, 1), torch.tensor([1.0, 2.0]), torch.zeros(2))
    assert metrics.result() == {"loss": 1.5}
    assert Metrics().result() == {}


def test_many_classes_have_no_confusion_matrix() -> None:
    metrics = Metrics(classes=1000, top_k=(5,)).update(*batch(8, 1000))
    assert metrics.confusion is None
    assert set((metrics + metrics).result()) == {"loss", "accuracy", "top_5_accuracy"}


def test_auroc_is_nan_without_negatives_or_with_scores_that_are_not_finite() -> None:
    outputs, losses, _ = batch(4, 2)
    metrics = Metrics(classes=2, keep_scores=True)
    assert math.isnan(metrics.update(outputs, losses, torch.ones(4, dtype=torch.int64)).result()["auroc"])
    result = metrics.update(outputs * math.nan, losses, torch.tensor([0, 1, 0, 1])).result()
    assert math.isnan(result["auroc"])


@pytest.mark.parametrize("label", [-1, 3])
def test_a_target_out_of_range_is_named(label: int) -> None:
    with pytest.raises(DataError, match=rf"a target is {label}\n.*0\.\.2"):
        Metrics(classes=3).update(torch.zeros(2, 3), torch.zeros(2), torch.tensor([0, label]))


def test_outputs_and_losses_that_do_not_fit() -> None:
    targets = torch.tensor([0, 1])
    with pytest.raises(ConfigError, match="with 3 classes"):
        Metrics(classes=3).update(torch.zeros(2, 4), torch.zeros(2), targets)
    with pytest.raises(DataError, match="one loss per example"):
        Metrics(classes=3).update(torch.zeros(2, 3), torch.tensor(1.0), targets)


@pytest.mark.parametrize(
    "settings_",
    [
        {"classes": 0},
        {"top_k": (1,)},
        {"keep_scores": True},
        {"classes": 3, "top_k": (4,)},
        {"classes": 3, "top_k": (0,)},
    ],
)
def test_settings_that_make_no_sense(settings_: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Metrics(**settings_)  # type: ignore[arg-type]


def test_metrics_set_up_differently_do_not_add() -> None:
    with pytest.raises(ConfigError, match="cannot add"):
        Metrics(classes=3) + Metrics(classes=4)
