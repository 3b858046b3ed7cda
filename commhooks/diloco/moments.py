"""The inner optimizer's moments, averaged over the ranks with the fragment whose parameters they belong to.

Source: Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020, which compares the momentum
that each rank keeps ("local") with one of all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.diloco.parts import WEIGHT, Fragment, RoundPart, mean_weight, weigh
from commhooks.diloco.shards import Shards
from commhooks.errors import AttachError, CheckpointError, CompressorError
from commhooks.exchange.exchanger import TensorChannel, TensorFeed
from commhooks.exchange.handle import Handle
from commhooks.exchange.options import Settings
from commhooks.scheduling.connection import Connection
from commhooks.scheduling.ledger import Statistics
from commhooks.tensors import all_finite, has_own_bytes, local

_COUNTS = "the ranks' counts"
"""The name of what ranks compare: each writes a digest of its counts into a row of its own."""
_PIECES, _BITS = 3, 20
"""A digest is this many integers of so many bits, which fp32 still holds after a division by the number of ranks."""


class Moments(RoundPart):
    """What the inner optimizer keeps for a fragment's parameters: its turn is the fragment's.

    Tensors are averaged, uncompressed and in at least fp32 (fp64 if ranks have weights), over the ranks on which all of
    them are finite. Counts, such as Adam's "step", must be equal on all ranks. Which tensors there are is only known
    after the optimizer's first step; if that changes, it must change on all ranks in the same round.
    """

    def __init__(
        self,
        fragment: Fragment,
        label: str,
        optimizer: Optimizer,
        settings: Settings,
        connection: Connection,
        shards: Shards,
        *,
        on_host: bool,
        weighted: bool,
    ) -> None:
        super().__init__(fragment.turn)
        self.fragment = fragment
        self._named = fragment.named
        self._label = f"moments of {label}"
        self._optimizer = optimizer
        self._settings = settings
        self._connection = connection
        self._on_host = on_host
        self._is_weighted = weighted
        self._shards = shards
        self._weight = 1.0
        self._tensors: dict[str, Tensor] = {}
        """What is sent, while a round begins."""
        self._counts = ""
        """The counts at the beginning of the last round, one a line."""
        self._handle: Handle[TensorChannel] | None = None
        self._earlier: list[Statistics] = []
        """The counts of exchanges of other tensors, which were closed."""
        self.like: Mapping[str, Tensor] = {}

    def statistics(self) -> list[Statistics]:
        """Return this rank's counts of all exchanges so far."""
        return [*self._earlier, *([self._handle.statistics()] if self._handle is not None else [])]

    @property
    def last_bytes(self) -> int:
        """The bytes of the last round."""
        return 0 if self._handle is None else self._handle.last_step().moved_bytes

    def begin(self, due: int, weight: float | None = None) -> None:
        """Start averaging, as `RoundPart.begin` does; all ranks agree that each of them is finite here, or none."""
        self._weight = 1.0 if weight is None else weight
        found = dict(self._now())
        self._tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        self._counts = "\n".join(f"{name}: {value}" for name, value in found.items() if name not in self._tensors)
        self._lay_out()
        super().begin(due)
        self._tensors = {}

    def write(self, room: Mapping[str, Tensor]) -> None:
        """Write the tensors, and a digest of the counts."""
        for name, own in self._tensors.items():
            room[name].copy_(own)
        sent = [room[name] for name in self._tensors]
        are_finite = self._shards.all_agree(bool(all_finite(sent)))
        weigh(sent, room[WEIGHT], self._weight, are_finite=are_finite)
        room[_COUNTS].zero_()[self._connection.rank].copy_(_digest(self._counts))

    def means(self) -> Mapping[str, Tensor]:
        """Wait for the means under way, and return them; raise on every rank if the ranks' counts differed."""
        means = super().means()
        if self._loaded is None:  # those that were saved have been compared
            rows = (means[_COUNTS] * self._connection.world_size).round()
            if not bool((rows == rows[0]).all()):
                self._name_differences()
        return means

    def apply(self, means: Mapping[str, Tensor], mixing: float) -> None:
        """Set each tensor to mixing·tensor + (1 - mixing)·mean; leave them if they are finite on no rank."""
        ranks = len(means[_COUNTS])  # those that sent them, of which there may have been others before a resume
        weight = mean_weight(means[WEIGHT], ranks, weighted=self._is_weighted)
        now = dict(self._now())
        for name, mean in means.items() if weight else ():
            if name in (WEIGHT, _COUNTS):
                continue
            own = now.get(name)
            if not isinstance(own, Tensor) or own.shape != mean.shape:
                raise CheckpointError(
                    f"DiLoCo: a mean of {name!r}, of shape {tuple(mean.shape)}, is due, and the optimizer has none; if "
                    "this run was resumed, load the optimizer's state too."
                )
            of_all = (mean if weight == 1 else mean / weight).to(own.device, own.dtype)
            if mixing and all_finite([own]):
                own.lerp_(of_all, 1 - mixing)
            else:
                own.copy_(of_all)

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`: the optimizer's own may be loaded later, so nothing is compared yet."""
        self._averaging = None
        self.due: int | None = state.get("at")
        self._loaded = None if self.due is None else {name: one.clone() for name, one in state["mean"].items()}

    def close(self) -> None:
        """End the exchange."""
        if self._handle is not None:
            self._handle.close()

    def _now(self) -> Iterator[tuple[str, object]]:
        """Yield the state by name: tensors to average, and counts, which are Python's numbers."""
        for number, group in enumerate(self._optimizer.param_groups):
            if "step" in group:  # where fused optimizers of other libraries count
                yield f"step of group {number}", _number(group["step"])
        for name, parameter in self._named.items():
            kept: Mapping[str, object] = self._optimizer.state.get(parameter, {})
            for key in sorted(kept, key=str):
                if kept[key] is not None:
                    yield f"{key} of {name}", self._part_of(f"{key} of {name}", key, kept[key], local(parameter))

    def _part_of(self, name: str, key: str, value: object, parameter: Tensor) -> object:
        own = local(value) if isinstance(value, Tensor) else value
        if isinstance(own, int | float) or (
            isinstance(own, Tensor) and own.numel() == 1 and (key == "step" or own.dim() == 0 < parameter.dim())
        ):
            return _number(own)
        if isinstance(own, Tensor) and has_own_bytes(own) and (own.is_floating_point() or own.is_complex()):
            return torch.view_as_real(own) if own.is_complex() else own
        what = f"a tensor of {own.dtype}" if isinstance(own, Tensor) else f"a {type(own).__name__}"
        raise CompressorError(
            f"DiLoCo(optimizer_state='mean'): {name!r} of {type(self._optimizer).__name__} is {what}, which has no "
            "mean; only dense floating-point tensors have. Set optimizer_state='local', or train with an optimizer "
            "whose state is not encoded."
        )

    def _lay_out(self) -> None:
        """Make an exchange of the tensors, unless the one that there is has the same; ranks compare them first."""
        first = local(next(iter(self._named.values())))
        wide = torch.float64 if self._is_weighted else torch.float32  # it holds the products with a weight
        wanted = {name: (own.shape, torch.promote_types(own.dtype, wide)) for name, own in self._tensors.items()}
        wanted |= {WEIGHT: (torch.Size(()), wide)}
        wanted |= {_COUNTS: (torch.Size((self._connection.world_size, _PIECES)), wide)}
        label = self._label
        if self._handle is not None:
            held = {name: (one.shape, one.dtype) for name, one in self.like.items()}
            if wanted == held:
                return
            changed = next(name for name in sorted(wanted.keys() | held.keys()) if wanted.get(name) != held.get(name))
            label += f" since {changed!r} {'is there' if changed in wanted else 'is gone'}"
            self._earlier.append(self._handle.statistics())
            self._handle.close()
        device = torch.device("cpu") if self._on_host else first.device
        self.like = {
            name: torch.empty(shape, dtype=dtype, device=device, pin_memory=device != first.device)
            for name, (shape, dtype) in wanted.items()
        }
        self._handle = Handle(_MomentsFeed({label: self.like}), AllReduceMean(), self._settings, self._connection)
        self.exchanger: TensorChannel = self._handle[label]

    def _name_differences(self) -> NoReturn:
        """Raise `CompressorError` on every rank, with the counts that differ."""
        found = "workers of one process differ"
        try:
            self.exchanger.engine.agree(self._counts, "comparing the optimizers' counts", self.exchanger.device)
        except AttachError as error:
            found = str(error)
        raise CompressorError(
            "DiLoCo(optimizer_state='mean'): the ranks' optimizers must have taken equally many steps, since otherwise "
            f"their moments have no mean: {found} Nothing was changed. Let no rank skip a step, as a GradScaler does, "
            "or set optimizer_state='local'."
        )


class _MomentsFeed(TensorFeed):
    """The moments of one fragment."""

    caller = "DiLoCo"
    ended = "this DiLoCo was closed"


def _number(value: Any) -> float:
    return float(value)


def _digest(text: str) -> Tensor:
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
    pieces = [number >> (_BITS * piece) & ((1 << _BITS) - 1) for piece in range(_PIECES)]
    return torch.tensor(pieces, dtype=torch.float32, device="cpu")
