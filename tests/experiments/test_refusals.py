"""What cannot work is refused in words before anything starts: each row is what is given, and what the error says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from commhooks.experiments.cluster import Cluster, follow
from commhooks.experiments.links.link import LinkSettings, parse_latency, parse_rate
from commhooks.experiments.runs import SHARDED, RunSettings
from commhooks.experiments.specs import Spec
from commhooks.experiments.sweeps.plan import plan
from commhooks.experiments.tasks import load_task
from commhooks.experiments.tasks.optimizers import make_optimizer
from commhooks.experiments.training.stock import check_stock
from experiments.studies.leaderboard.contenders import contenders
from tests.experiments.test_ablation import ABLATION
from tests.experiments.test_diloco import STEPS
from tests.experiments.test_runs import planned

NOT_A_RATE = "does not parse: expected a number and a unit, such as '100Mbit/s'"
NOT_A_LATENCY = "latency .* does not parse"
ASCENDING = "above zero and ascending"
NO_SHARDS = "cannot average shards of gradients"


def stock(text: str) -> None:
    check_stock(Spec.parse(text))


def optimizer(text: str) -> object:
    return make_optimizer(Spec.parse(text, "optimizer"), nn.Linear(2, 2))


def diloco(settings: str) -> object:
    return plan(["digits:size=tiny"], [f"diloco{settings}"], links=["10Mbit/s"], steps=STEPS)


def sharded(**changes: Any) -> object:
    return plan(["gpt:size=tiny"], **{"hooks": ["int8"], "links": ["10Mbit/s"], "ddp": SHARDED, **changes})


def run(**changes: Any) -> object:
    return RunSettings(task=Spec("gpt"), **changes)


def cluster(hosts: int, **settings: Any) -> object:
    return Cluster.create(hosts, **settings)


def followed(*schedule: tuple[float, float]) -> None:
    with follow(Cluster("not-made", 2), schedule):
        pass


def contending(*names: str) -> object:
    return contenders(names, load_task("digits:size=tiny"))


def ablation(**changes: Any) -> object:
    return dataclasses.replace(ABLATION, **changes)


REFUSED: dict[Callable[..., object], list[tuple[Any, str]]] = {
    parse_rate: [
        *((text, NOT_A_RATE) for text in ("", "fast", "100", "100 furlongs", "-1Mbit/s", "1Mibit/s", "Mbit/s", "1e3")),
        ("100Mbit/h", NOT_A_RATE),
        ("0Mbit/s", "above zero"),
    ],
    parse_latency: [(text, NOT_A_LATENCY) for text in ("", "5", "5min", "-1ms")],
    LinkSettings: [
        ({"bits_per_second": 0.0}, "bits_per_second must be in"),
        ({"schedule": ((30.0, 1e6), (20.0, 1e6))}, ASCENDING),
        ({"schedule": ((1.0, 1e6),), "down_bits_per_second": 1e6}, "leave out down_bits_per_second"),
        ({"kind": "hosts", "latency_seconds": 0.1}, "'hosts' takes no latency: tc .*Use kind 'emulated'"),
        ({"kind": "real", "bits_per_second": 1e6}, "'real' takes no rate: it is used as it is"),
    ],
    LinkSettings.parse: [
        ("", "empty text; expected '100Mbit/s'"),
        ("host:1Mbit/s", "kind 'host' is not known: .*did you mean 'hosts'"),
        ("1Mbit/s,latncy=5ms", "key 'latncy' is not known: .*did you mean 'latency'"),
        ("1Mbit/s+2Mbit/s", "says when it begins"),
        ("1Mbit/s,down=unlimited", "receives without a limit is not modelled"),
    ],
    Spec.parse: [
        (text, "does not parse")
        for text in ("", ":rank=4", "powersgd:rank", "powersgd:=4", "powersgd:rank=", "powersgd:rank=1,rank=2")
    ],
    stock: [
        ("torch.bf16", "by its name, only with NCCL.*'torch.fp16' runs"),
        ("torch.powersgd:rank=4", "there is no setting 'rank'.*matrix_approximation_rank"),
        ("torch.powersgd:matrix_approximation_rank=0", "must be at least 1"),
    ],
    optimizer: [
        ("sgdd", "did you mean 'sgd'"),
        ("lbfgs", "cannot be used here"),
        ("adam:betas=0.9", r"must be 2 numbers joined by '\+', such as 0.9\+0.999"),
        ("sgd:lr=fast", "lr must be a finite number, such as 0.001 .got fast."),
    ],
    load_task: [
        ("imagenet", "expected one of .*digits, gpt"),
        ("digits:small", "settings of a built-in task have names, such as 'digits:size=small'"),
        ("digits:size=small,chanels=3", "has no parameter 'chanels'; it has .*channels"),
        ("gpt:size=huge", "size 'huge' .* expected one of tiny, small, medium,( base,)? large"),
        ("gpt:width=100,heads=8", "8 heads do not divide a width of 100"),
        ("digits:network=lenet", "network must be one of cnn, mlp, resnet, resnet18, vgg"),
        *((f"digits:skew={skew}", f"skew must be between 0 and 1 .got {skew}") for skew in ("-0.1", "1.5")),
        ("nowhere.py:task", r"there is no file nowhere.py \(the current folder is"),
        ("no_such_module:task", "no module 'no_such_module'.*or a file"),
        ("json:nothing", r"function 'nothing' is not known: expected one of .*dump"),
    ],
    planned: [
        ({"hooks": ["powersgd:rnak=4"]}, r"has no setting 'rnak'; it takes .*rank.*Did you mean 'rank'"),
        ({"hooks": ["powersgd:skip=haed"]}, "'haed' must match a parameter's name"),
        ({"hooks": []}, "name at least one task, one hook"),
        ({"seeds": [0, 0]}, "0 is given twice"),
        ({"tasks": ["tests/experiments/odd_task.py:nothing"]}, "expected a Task, or a tuple"),
        ({"tasks": ["tests/experiments/odd_task.py:no_scalar"]}, "the mean over the batch .got a tensor"),
        ({"tasks": ["tests/experiments/odd_task.py:fails"]}, "on the first batch, .*: RuntimeError"),
        ({"links": ["hosts:50kbit/s"]}, "link 'hosts:50kbit/s': .* at least 0.1 Mbit/s .* .got 50 kbit/s"),
        (
            {"links": ["hosts:50kbit/s"], "compute": "1x"},
            "with compute 1x, by which its rates are multiplied: .* .got 50 kbit/s",
        ),
    ],
    diloco: [
        (":evry=3", "setting 'evry' is not known: .*; did you mean 'every'?"),
        (":every=0", "every must be an int of at least 1"),
        (":every=15", "a run of 14 steps ends before the first round; let it take at least 15"),
        (":every=4,delay=4", "delay must be an int from 0 to 3"),
        (":every=4,outer=best", "outer='best'.: expected auto, average, published"),
        (":every=4,compressor=inty4", "Did you mean 'int4'"),
        (":every=4,compressor=(int4:policy=fused)", "policy has no effect"),
    ],
    sharded: [
        ({"hooks": ["dgc:ratio=0.1"]}, rf"{NO_SHARDS}.*torch.none \(plain FSDP2\) and all-reduce, bf16"),
        *(({"hooks": [hook]}, NO_SHARDS) for hook in ("powersgd", "diloco:every=4", "torch.fp16")),
        ({"hooks": ["int8:policy=fused"]}, "policy has no effect"),
        ({"hooks": ["int8:gather=powersgd"]}, "other compressors average gradients"),
        ({"ranks": [1]}, "one rank has no shards to exchange"),
        ({"bucket_cap_mb": 4}, "leave out bucket_cap_mb"),
    ],
    run: [
        ({"bucket_cap_mb": 0.0}, "bucket_cap_mb"),
        *(({"compute": text}, "compute .* does not parse") for text in ("", "fast", "200", "0ms", "0x", "-1s", "1s2")),
    ],
    RunSettings.from_dict: [
        ([{"task": "gpt", "hok": "fp16"}], "setting 'hok' is not known: .*did you mean 'hook'"),
        ([{"hook": "fp16"}], "a run needs a task"),
        ([{"task": "gpt", "steps": "ten"}], r"steps must be a whole number \(got 'ten'\)"),
    ],
    cluster: [
        ({"hosts": 0}, r"a cluster has 1 to 250 hosts, one address each \(got 0\)"),
        ({"hosts": 2, "up": 50.0}, r"at least 0.1 Mbit/s and below 1 Tbit/s, or unlimited \(got 50 bit/s\)"),
        ({"hosts": 2, "name": "../demo"}, "cluster name '../demo': expected at most 40 lower-case letters"),
    ],
    followed: [
        ([(2.0, 1e6), (1.0, 1e7)], "must be at least"),
    ],
    contending: [(["topk"], "did you mean 'top-k'"), (["top-k", "top-k"], "asked for twice")],
    ablation: [
        ({"seeds": 1}, "seeds must be at least 2"),
    ],
}


@pytest.mark.parametrize(
    ("call", "given", "words"),
    [(call, *row) for call, rows in REFUSED.items() for row in rows],
    ids=[f"{call.__qualname__}-{given}" for call, rows in REFUSED.items() for given, _ in rows],
)
def test_what_cannot_work_is_refused_in_words(call: Callable[..., object], given: Any, words: str) -> None:
    named = given if isinstance(given, dict) else {}
    others = [given] if isinstance(given, str) else [] if named else given
    with pytest.raises(ValueError, match=words):
        call(*others, **named)
