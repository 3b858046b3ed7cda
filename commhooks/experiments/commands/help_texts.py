"""The text that `--help` prints for each command after its summary, with examples."""

from __future__ import annotations

from commhooks.experiments.commands.purpose import COMMANDS

_EXPLAINED = {
    "compare": """
All runs of a seed have the same data; only the communication hook differs. \
Runs that differ only in the hook take turns, one step each, so that their times can be compared. \
A hook with faster steps then continues until it has reached the target or used the baseline's time (--go-on): \
hooks are compared first after equal time, and second after equal steps. \
Ranks are processes on this machine, connected by an emulated link whose rate you choose; it does not need root.

[bold]The demo[/bold]: two tasks under five hooks on 2 ranks at 100 Mbit/s, about four minutes.

    commhooks compare

[bold]Choose[/bold] the task, the hooks, the link and the ranks.

    commhooks compare --task gpt --hook all-reduce --hook powersgd:rank=8 --rate 1Gbit/s --ranks 3

[bold]Your own model[/bold]: a function that returns model, data and loss. Three seeds give intervals.

    commhooks compare --task my_task.py:task --hook all-reduce --hook fp16 --seeds 3 --out runs/mine

[bold]Several links[/bold]: repeat --rate, or --link for links in full.

    commhooks compare --task gpt --link 100Mbit/s,latency=1ms --link 1Gbit/s,latency=1ms

[bold]Real links on this machine[/bold], as root: each rank on a host of its own, a network namespace.

    commhooks compare --task gpt --link hosts:100Mbit/s --ranks 4

[bold]More ranks than cores[/bold] make compute look slow: state the time of a step's compute on your processor.

    commhooks compare --task gpt --ranks 4 --compute 40ms

[bold]One hook[/bold], with another optimizer, for exactly its steps; the same command with another --hook \
adds to the folder.

    commhooks compare --task gpt --hook top-k --optimizer adamw:lr=1e-3 --seeds 3 --go-on 1 --out runs/top-k

[bold]A quick look[/bold], on a small model.

    commhooks compare --task digits:size=small --steps 30

[bold]Several machines[/bold], over their own network: torchrun starts the ranks.

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:29500 --no-python commhooks compare --link real

[bold]A hook[/bold] is a name, or a name with settings: fp16, powersgd:rank=4,start_after=10. \
The others are compared with all-reduce, or with the first hook if all-reduce is not run; --baseline names another. \
An unknown name or setting is reported before anything starts, with the names that exist.

[bold]The folder[/bold] given by --out receives report.html (one self-contained file), \
results/*.json (settings, versions, machine and every step of each run), plots/ (PNG, SVG, PDF), \
tables/ (CSV, LaTeX) and tensorboard/. \
Runs with a result in the folder are not run again: after Ctrl-C, the same command continues, and more seeds or hooks \
are added. --overwrite first removes the results, but no file that this program did not write.
""",
    "sweep": """
[bold]Begin[/bold] with a file that works, and change it.

    commhooks sweep --example > sweep.yaml
    commhooks sweep sweep.yaml --dry-run
    commhooks sweep sweep.yaml

[bold]A setting[/bold] has a value or a list of values; all combinations are run. \
After Ctrl-C, a power failure or a kill, the same command continues where it stopped. \
A run that fails does not end the others: its traceback is in FOLDER/failures, and it is tried again the next time.

[bold]Other examples[/bold] are in docs/examples/sweeps: quick.yaml (a minute), slow-links.yaml (an hour, as root).

    commhooks sweep docs/examples/sweeps/quick.yaml
""",
    "report": """
[bold]One folder[/bold], for example after adding to it.

    commhooks report runs/demo

[bold]Several folders[/bold] in one report, with another baseline than all-reduce.

    commhooks report runs/first runs/second --out runs/both --baseline fp16

[bold]For a program[/bold]: the same figures as JSON, with units, spread and seeds.

    commhooks report runs/demo --json demo.json
""",
    "profile": """
Some steps run unchanged. Then the hooks take turns in steps that send nothing: these show each hook's cost besides \
its transfers. Afterwards the model is as before. The guide (plan.md) explains the table.

[bold]A task of yours[/bold], on two ranks of this machine.

    commhooks profile --task my_task.py:task --json profile.json

[bold]On your cluster[/bold], with two hooks on PyTorch's DistributedDataParallel.

    torchrun --nnodes 4 ... -m commhooks.experiments profile --task my_task.py:task --ddp torch \
--hook fp16 --hook powersgd:rank=4,policy=fused
""",
    "hooks": """
[bold]All names[/bold], ours and PyTorch's.

    commhooks hooks

[bold]One of them[/bold], or a class of your own, named as for --hook.

    commhooks hooks powersgd
    commhooks hooks mypackage.module:TopK
""",
    "check": """
Every law is tried on a few workers in this process, in about ten seconds: replicas agree, what is not sent is kept, \
an inf shows everywhere, runs are resumed bit for bit, a step leaves out no more than is declared. A line says of each \
law whether it is kept, broken, or does not apply. The exit code is 1 if any is broken.

[bold]Your own compressor or codec[/bold], from a file or a package, with its settings.

    commhooks check my_compressor.py:RandomRows:every=8
    commhooks check mypackage.codecs:ThreeBits

[bold]One law[/bold], while you look for what breaks it.

    commhooks check my_compressor.py:RandomRows --law conservation

[bold]Any hook[/bold], as for --hook.

    commhooks check powersgd:rank=4
""",
    "tasks": """
[bold]All names[/bold], and the settings of one, or of your own function.

    commhooks tasks
    commhooks tasks digits
    commhooks tasks my_task.py:task
""",
    "env": """
It needs no packages besides those of commhooks itself. Names of hosts, users and folders are left out, so that the \
output can be posted as it is; variables that may contain them are only reported as set.

[bold]For an issue report.[/bold]

    commhooks env

[bold]For a script[/bold], as JSON.

    commhooks env --json -
""",
    "plan": """
A prediction needs a step and a network. The step is computed from tables (--parameters) or measured (--task), the \
network is given (--link) or probed. Every hook's cost in accuracy stands beside its speed, and the safest gain is \
named first. The guide (plan.md) describes the model, and its error against real steps.

[bold]In seconds[/bold], from the number of parameters and the time of a step's compute. Half of what ping reports is \
the latency.

    commhooks plan --parameters 25M --compute 200ms --link 200Mbit/s,latency=5ms

[bold]Your model[/bold], over your link as you state it; with --validate real steps follow.

    commhooks plan --task my_task.py:task --link 200Mbit/s,latency=5ms --validate

[bold]Your cluster[/bold]: the step and the network are measured.

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:29500 --no-python commhooks plan --task my_task.py:task

[bold]More ranks[/bold], DiLoCo and FSDP2.

    commhooks plan --task my_task.py:task --link 1Gbit/s,latency=50us --ranks 2..1024
    commhooks plan --task gpt --link 50Mbit/s,latency=20ms --hook int4 --hook diloco:every=30,compressor=int4
    commhooks plan --parameters 124M --compute 1s --link 1Gbit/s,latency=50us --sharded --hook int8
""",
    "probe": """
Every collective that compressors use is timed, from 256 bytes to as much as the time allows, in turns. \
A line (latency, and seconds for each byte) is fitted to the medians; if it does not fit, times are interpolated \
between the measured sizes. Nothing is predicted beyond four times the largest size. If two halves of the \
measurement disagree by more than 10 %, it is repeated once; what they still disagree by widens the predictions' error.

[bold]Your own cluster[/bold]: torchrun starts the ranks.

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:29500 --no-python commhooks probe --json probe.json

[bold]Hosts on this machine[/bold], as root, or an emulated link.

    commhooks probe --ranks 2 --link hosts:1Gbit/s
    commhooks probe --ranks 2 --link 100Mbit/s,latency=1ms

[bold]Only one model's messages[/bold]: larger ones in the same time.

    commhooks probe --profile profile.json --link hosts:1Gbit/s --json probe.json
""",
}


def help_of(command: str) -> str:
    """Return the command's summary, and the text that follows it."""
    return f"{COMMANDS[command]}\n{_EXPLAINED[command]}"
