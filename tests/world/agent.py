"""The store in which ranks meet that an agent of torchrun starts: its port belongs to it from the beginning."""

from __future__ import annotations

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not in its __all__


def agents_store() -> TCPStore:
    """Return a store that this process serves for as long as it keeps it."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def environment_of(store: TCPStore, ranks: int) -> dict[str, str]:
    """Return what an agent with this store sets for all of its ranks."""
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
