"""Compare hooks in a script: run it again after an interruption, and it continues."""

from commhooks.experiments import compare, load_table

if __name__ == "__main__":
    hooks = ["all-reduce", "fp16", "powersgd:rank=2,start_after=5"]
    table = compare(["digits:size=small"], hooks, links=["10Mbit/s", "100Mbit/s"], seeds=3, out="runs/mine")
    print(table.groupby(["link", "hook"])[["held_out_loss", "ratio"]].mean())
    print(load_table("runs/mine").pivot_table("step_seconds", index="hook", columns="link"))
