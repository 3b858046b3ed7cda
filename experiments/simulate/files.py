"""Files of measurements: what `commhooks simulate --save` writes and `--measured` reads."""

from __future__ import annotations

from pathlib import Path

from commhooks.communicators.links import Link
from commhooks.errors import CommHooksError
from commhooks.planning import stored
from commhooks.planning.predicting import predict
from commhooks.planning.series import Series

FORMAT = 2  # increased when readers must change; until 1, compression was timed among workers, without steps


def write(series: Series, path: Path) -> None:
    """Write the file, completely or not at all."""
    stored.write(series, path, form=FORMAT)


def read(path: Path) -> Series:
    """Return the measurements in a file.

    Raises:
        ValueError: There is no such file, or it does not hold measurements that steps can be computed from.

    """
    try:
        series = stored.read(Series, path, form=FORMAT)
        for ranks in (2, 3, 10_000):
            profile = series.at(ranks)
            for hook in profile.hooks.values():
                predict(profile, hook, Link(rate=1e9))
    except (OSError, ValueError, LookupError, TypeError, CommHooksError) as error:
        raise ValueError(
            f"measured {path}: expected a file of format {FORMAT} that 'commhooks simulate --save' wrote "
            f"({type(error).__name__}: {error}); measure again with --task and --save"
        ) from error
    return series
