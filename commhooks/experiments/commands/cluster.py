"""The commands `commhooks cluster ...`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from commhooks.experiments.commands.purpose import COMMANDS
from commhooks.experiments.commands.terminal import CONTEXT, EachOptionOnce, Explained, errors_in_words

if TYPE_CHECKING:
    from commhooks.experiments.cluster import Cluster

_HELP = f"""
{COMMANDS["cluster"]}

A host is a network namespace: it has an address and a cable to a switch, with a rate in each direction. \
A program on it reaches only the other hosts. All of this needs root, and iproute2.

[bold]A cluster of four hosts[/bold], at 100 Mbit/s in both directions; it stays until it is removed.

    commhooks cluster create demo --hosts 4 --rate 100Mbit/s
    commhooks cluster list
    commhooks cluster remove demo

[bold]Change a link[/bold], also while a run uses it: the cluster of a run is in the list too.

    commhooks cluster set-rate demo 10Mbit/s
    commhooks cluster set-rate demo 1Gbit/s --host 2 --direction up
    commhooks cluster unplug demo 3
    commhooks cluster plug-in demo 3

[bold]Run anything[/bold] on a host, as on a machine of that network. \
Host 0 has the address 10.77.0.1, host 1 has 10.77.0.2.

    commhooks cluster exec demo 0 -- torchrun --nnodes 2 --node-rank 0 --master-addr 10.77.0.1 train.py
    commhooks cluster exec demo 1 -- torchrun --nnodes 2 --node-rank 1 --master-addr 10.77.0.1 train.py
"""

app: typer.Typer = typer.Typer(
    help=_HELP,
    cls=Explained,
    context_settings=CONTEXT,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Name = Annotated[str, typer.Argument(help="The cluster's name.")]
Host = Annotated[int, typer.Argument(help="The host's number, from 0.")]


@app.command(cls=EachOptionOnce)
def create(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits and hyphens.")],
    hosts: Annotated[int, typer.Option(help="The number of hosts.")] = 4,
    rate: Annotated[str, typer.Option(help="The rate of every link: 100Mbit/s, 12.5MB/s, unlimited.")] = "100Mbit/s",
    up: Annotated[str | None, typer.Option(help="The rate at which hosts send; default: --rate.")] = None,
    down: Annotated[str | None, typer.Option(help="The rate at which hosts receive; default: --rate.")] = None,
) -> None:
    """Make a cluster that stays until it is removed."""
    with errors_in_words():
        from commhooks.experiments.cluster import Cluster
        from commhooks.experiments.links.text import parse_rate

        made = Cluster.create(hosts, up=parse_rate(up or rate), down=parse_rate(down or rate), name=name, kept=True)
        last = hosts - 1
        typer.echo(f"cluster {name}: hosts 0 to {last}, addresses {made.address(0)} to {made.address(last)}")


@app.command("list", cls=EachOptionOnce)
def list_clusters() -> None:
    """Print the clusters of this machine, with their hosts and links."""
    with errors_in_words() as console:
        from rich.table import Table

        from commhooks.experiments.cluster import ClusterError, clusters
        from commhooks.experiments.cluster.preflight import require
        from commhooks.experiments.cluster.records import record_of
        from commhooks.experiments.links.text import format_rate

        require()
        found = clusters()
        if not found:
            typer.echo("no cluster; make one with: commhooks cluster create demo --hosts 4 --rate 100Mbit/s")
            return
        table = Table("cluster", "host", "address", "up", "down", "sent", "received", "cable")
        for cluster in found:
            try:
                states = cluster.state()
            except ClusterError:  # it was removed meanwhile, or somebody deleted a part of it
                if record_of(cluster.name) is not None:
                    typer.echo(f"parts of cluster {cluster.name} are missing: commhooks cluster remove {cluster.name}")
                continue
            for state in states:
                rates = format_rate(state.up), format_rate(state.down)
                traffic = f"{state.sent / 1e6:,.1f} MB", f"{state.received / 1e6:,.1f} MB"
                cable = "plugged in" if state.plugged_in else "unplugged"
                table.add_row(cluster.name, str(state.host), state.address, *rates, *traffic, cable)
        console.print(table)


@app.command(cls=EachOptionOnce)
def set_rate(
    name: Name,
    rate: Annotated[str, typer.Argument(help="The new rate: 10Mbit/s, unlimited.")],
    host: Annotated[int | None, typer.Option(help="Only this host's link; default: all.")] = None,
    direction: Annotated[
        Literal["up", "down", "both"], typer.Option(help="up: what hosts send; down: what they receive.")
    ] = "both",
) -> None:
    """Change the rate of links, also while a run uses them."""
    with errors_in_words():
        from commhooks.experiments.links.text import parse_rate

        _cluster(name).set_rate(parse_rate(rate), direction=direction, host=host)


@app.command(cls=EachOptionOnce)
def unplug(name: Name, host: Host) -> None:
    """Pull a host's cable: it reaches nobody until it is plugged in again."""
    with errors_in_words():
        _cluster(name).unplug(host)


@app.command(cls=EachOptionOnce)
def plug_in(name: Name, host: Host) -> None:
    """Plug a host's cable in again."""
    with errors_in_words():
        _cluster(name).plug_in(host)


@app.command("exec", cls=EachOptionOnce)
def execute(
    name: Name, host: Host, command: Annotated[list[str], typer.Argument(help="The command and its arguments.")]
) -> None:
    """Run a command on a host, with variables that name its interface to Gloo and NCCL; exit with its exit code."""
    with errors_in_words():
        from commhooks.experiments.cluster import INTERFACE

        _cluster(name).enter(host)
        interfaces = {f"{library}_SOCKET_IFNAME": INTERFACE for library in ("GLOO", "NCCL", "TP")}
        try:
            os.execvpe(command[0], command, {**os.environ, **interfaces})
        except OSError as error:
            raise ValueError(f"cannot run {command[0]!r}: {error.strerror}") from error


@app.command(cls=EachOptionOnce)
def remove(name: Name) -> None:
    """Remove a cluster; programs still running on its hosts lose their network."""
    with errors_in_words():
        from commhooks.experiments.cluster.records import record_of

        cluster = _cluster(name)
        record = record_of(name)
        if record is not None and record.owner is not None and record.owner.is_alive:
            raise ValueError(
                f"cluster {name!r} belongs to process {record.owner.pid}, which removes it at its end: end that process"
            )
        cluster.remove()


def _cluster(name: str) -> Cluster:
    """Return the cluster of this name.

    Raises:
        ClusterError: There is no such cluster, or this machine cannot have clusters.

    """
    from commhooks.experiments.cluster import Cluster
    from commhooks.experiments.cluster.preflight import require

    require()
    return Cluster.find(name)
