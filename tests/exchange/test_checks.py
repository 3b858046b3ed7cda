"""What is told of a compressor that compresses little: never of models that low ranks compress well."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from commhooks import PerParameter, make_compressor
from commhooks.exchange.checks import checked_compressor, warn_of_whole
from commhooks.experiments.tasks.gpt import SIZES, GptModel
from commhooks.language.place import Place
from experiments.studies.bench.given import resnet18_shapes
from tests.commhooks.models import lstm_shapes

COMPRESSORS = [f"{name}:rank={rank}" for name in ("powersgd", "svd") for rank in (1, 2, 4)] + ["adaptive-rank", "int8"]


def vit_shapes(width: int = 768, layers: int = 12) -> list[tuple[int, ...]]:
    """Return the shapes of a vision transformer's parameters, for images of 224×224 in patches of 16×16."""
    of_layer = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), *[(width,)] * 6]
    return [(1, 197, width), (width, 3, 16, 16), (1, 1, width), *of_layer * layers, (1000, width)]


def model(name: str) -> dict[str, Tensor]:
    if name == "GPT":
        with torch.device("meta"):
            return dict(GptModel(SIZES["small"]).named_parameters())
    shapes = {"ResNet-18": resnet18_shapes, "LSTM": lstm_shapes, "ViT": vit_shapes}[name]()
    return {f"layer{i}": torch.empty(shape, device="meta") for i, shape in enumerate(shapes)}


def told(compressor: object, named: Mapping[str, Tensor], ranks: int = 8) -> str:
    """Return what is told of a compressor's use for these parameters; "" if nothing is."""
    one = checked_compressor("attach", compressor)  # type: ignore[arg-type]  # text, or a compressor
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        warn_of_whole("attach", ((one, Place(name, tensor, ranks)) for name, tensor in named.items()))
    assert len(heard) <= 1
    return str(heard[0].message) if heard else ""


@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("name", ["ResNet-18", "LSTM", "GPT", "ViT"])
def test_nothing_is_told_of_common_models(name: str, compressor: str) -> None:
    assert told(compressor, model(name)) == ""


def test_the_largest_three_are_named_with_the_first_ones_reason() -> None:
    shapes = {"embedding": (1000, 64), "a": (20, 6, 6), "b": (40, 40), "c": (16, 12), "d": (30, 30), "bias": (500,)}
    named = {name: torch.zeros(shape) for name, shape in shapes.items()} | {
        "embedding": nn.Parameter(torch.zeros(60, 60))
    }
    text = told("powersgd:rank=16", named)
    assert text.startswith("commhooks, attach: 93% of the gradients' bytes are sent uncompressed")
    assert (
        "'embedding' of shape (60, 60) (48%), 'b' of shape (40, 40) (21%), 'd' of shape (30, 30) (12%) and 2 others"
        in text
    )
    assert "1,920 elements would be sent of each matrix 60×60, not 2 times fewer" in text
    assert "48" not in told("powersgd:rank=1", named)


def test_blocks_that_are_too_large_are_told_of_and_what_a_rule_asks_for_is_not() -> None:
    named = {f"adapter.{i}": torch.zeros(4, 50) for i in range(8)} | {"bias": torch.zeros(10)}
    assert "blocks have 256 elements" in told("int8:block=256", named)
    assert told("int8:block=32", named, ranks=2) == ""
    assert "blocks have 32 elements" in told("int8:block=32", named, ranks=64)
    rule = PerParameter(rules=(("adapter.*", make_compressor("all-reduce")),), otherwise=make_compressor("int8"))
    assert told(rule, named) == ""
    assert told("all-reduce", named) == told("fp16", named) == told("top-k:ratio=0.01", named) == ""
