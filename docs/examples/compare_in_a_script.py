"""Compare hooks in a script: run it again after an interruption, and it continues."""

from commhooks.experiments import compare, load_table

if __name__ == "__main__":
    hooks = ["all-reduce", "fp16", "powersgd:rank=2,start_after=5"]
    links = ["10Mbit/s", "100Mbit/s"]
    table = compare(["digits:size=small"], hooks, links=links, seeds=3, out="runs/mine")
    print(table.groupby(["link", "hook"])[["held_out_loss", "ratio"]].mean())
    loaded = load_table("runs/mine")
    print(loaded.pivot_table("step_seconds", index="hook", columns="link"))
