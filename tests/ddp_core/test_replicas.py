"""How replicas are made alike: into which messages tensors are put, and that each gets its own back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddp_core import replicas

DTYPES = [torch.int64, torch.float32, torch.float64, torch.float16, torch.uint8]
JOINED, MOST = 64, 200

some_tensors = st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 60)), min_size=1, max_size=12)


@given(some_tensors)
def test_every_tensor_gets_the_sources_elements_in_messages_that_are_not_too_large(
    kinds: list[tuple[torch.dtype, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "JOINED_BYTES", JOINED)
        patch.setattr(replicas, "MESSAGE_BYTES", MOST)
        patch.setattr(replicas, "finish", lambda work: None)
        sources = [torch.arange(size).to(dtype) for dtype, size in kinds]
        others = [torch.full_like(source, 77) for source in sources]
        sent: list[Tensor] = []
        patch.setattr(replicas, "broadcast", _recorder(sent.append))
        replicas.broadcast_coalesced(sources, cast(dist.ProcessGroup, None), 0)
        on_their_way = iter(sent)
        patch.setattr(replicas, "broadcast", _recorder(lambda message: message.copy_(next(on_their_way))))
        replicas.broadcast_coalesced(others, cast(dist.ProcessGroup, None), 0)
        chunks = replicas._chunks(sources)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(others, sources, strict=True))
    for chunk in chunks:
        nbytes, is_mixed = sum(tensor.nbytes for tensor in chunk), len({tensor.dtype for tensor in chunk}) > 1
        assert nbytes <= (JOINED if is_mixed else MOST) or len(chunk) == 1


def _recorder(take: Callable[[Tensor], object]) -> Any:
    def broadcast(group: object, message: Tensor, source: int) -> None:
        take(message)

    return broadcast


def test_a_models_parameters_are_copied_once_though_it_has_integers_beside_them() -> None:
    """As a model with batch normalization has; a message of several dtypes is copied twice."""
    parameters = [torch.zeros(300_000), torch.zeros(300_000)]
    chunks = replicas._chunks([*parameters, torch.zeros((), dtype=torch.int64)])
    assert [[tensor.numel() for tensor in chunk] for chunk in chunks] == [[1], [300_000, 300_000]]
