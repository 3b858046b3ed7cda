"""A picture of a profile: the parts of each setting's step, and the moments when buckets are ready."""

from __future__ import annotations

import matplotlib

from ..predicting import Profile
from ..predicting.profiles import StepParts
from ..report.plots import LIGHT, Theme, canvas, png, style


def timeline(profile: Profile, theme: Theme = LIGHT) -> bytes:
    """Return a PNG: one bar for each setting, from the beginning of a step to its end, in milliseconds."""
    settings: dict[str, StepParts] = {"plain all-reduce": profile.plain}
    settings |= {label: hook.step for label, hook in profile.hooks.items()}
    colours = {
        "forward": theme.compute,
        "backward": theme.hooks[2],
        "exposed": theme.compression,
        "optimizer": theme.faint,
    }
    with matplotlib.rc_context(style(theme)):
        title = f"A step of {profile.model} on {profile.ranks} ranks"
        x_label = "milliseconds since the step began; nothing is sent except in the first bar"
        figure, axes = canvas(title, x_label, 8.0, 1.6 + 0.32 * len(settings))
        begins = [0.0] * len(settings)
        for part, colour in colours.items():
            lengths = [1e3 * getattr(step, part) for step in settings.values()]
            label = "exposed: communication, compression" if part == "exposed" else part
            axes.barh(list(settings), lengths, left=begins, color=colour, label=label, height=0.62)
            begins = [begin + length for begin, length in zip(begins, lengths, strict=True)]
        for number, label in enumerate(settings):
            if hook := profile.hooks.get(label):
                ready = [1e3 * bucket.ready for bucket in hook.buckets]
                name = "a bucket is ready" if label == "noop" else None
                axes.plot(ready, [number] * len(ready), "|", color=theme.ink, markersize=11, label=name)
            axes.annotate(
                f"{begins[number]:.1f}", (begins[number], number), (4, 0), textcoords="offset points", va="center"
            )
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, 1.08 * max(begins))
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=len(labels))
        return png(figure)
