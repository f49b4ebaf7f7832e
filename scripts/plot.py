"""Draws the CSVs of scripts/results as PNGs beside them; measures nothing.

python scripts/plot.py [NAME.csv ...]     default: every CSV that is there
"""

from __future__ import annotations

import argparse
import csv
import pathlib
from collections.abc import Callable

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = pathlib.Path(__file__).parent / "results"
Rows = list[dict[str, str]]


def conditions(rows: Rows) -> str:
    row = rows[0]
    return f"{row['gpu']}, torch {row['torch']}, triton {row['triton']}, {row['date']}"


def plot_kernels(rows: Rows) -> plt.Figure:
    """Percent of the copy bandwidth, one panel an operator: ours, and torchao's by its time for the same bytes."""
    rows = [row for row in rows if row["op"] != "copy"]
    names = list(dict.fromkeys(row["op"] for row in rows))
    grid_rows = -(-len(names) // 4)
    figure, axes = plt.subplots(grid_rows, 4, figsize=(18, 5 * grid_rows), sharex=True, squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    for axis, name in zip(axes.flat, names, strict=False):
        panel = [row for row in rows if row["op"] == name]
        ours = [float(row["% of copy"]) for row in panel]
        axis.barh(range(len(panel)), ours, 0.4, align="edge", label="ours")
        peers = [(i, row) for i, row in enumerate(panel) if row.get("torchao us")]
        if peers:
            percent = [ours[i] * float(row["us"]) / float(row["torchao us"]) for i, row in peers]
            axis.barh([i - 0.4 for i, _ in peers], percent, 0.4, align="edge", label="torchao")
            axis.legend(fontsize=7)
        axis.set_yticks(range(len(panel)), [row["shape"] for row in panel])
        axis.axvline(100, color="grey", linewidth=1)
        axis.set_title(name, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.invert_yaxis()
    axes[-1][0].set_xlabel("% of a device copy, by the bytes that the op must move")
    return figure


def plot_grouped_mm(rows: Rows) -> plt.Figure:
    """TFLOP/s over tokens, a panel for each shape and direction, uniform groups solid and skewed ones dashed."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    series = [column.removesuffix("_tflops") for column in rows[0] if column.endswith("_tflops")]
    highest = max(float(row[f"{name}_tflops"]) for row in rows for name in series)
    figure, axes = plt.subplots(
        len(shapes), len(directions), figsize=(4.5 * len(directions), 3.5 * len(shapes)), squeeze=False, sharey=True
    )
    for i, shape in enumerate(shapes):
        for j, direction in enumerate(directions):
            axis = axes[i][j]
            for color, name in enumerate(series):
                for routing, style in (("uniform", "-"), ("skewed", "--")):
                    points = sorted(
                        (int(row["T"]), float(row[f"{name}_tflops"]))
                        for row in rows
                        if (row["shape"], row["direction"], row["routing"]) == (shape, direction, routing)
                    )
                    label = name if routing == "uniform" else None
                    axis.plot(*zip(*points, strict=True), style, color=f"C{color}", marker=".", label=label)
            axis.set_xscale("log", base=2)
            axis.set_ylim(0, 1.05 * highest)
            axis.set_title(f"{shape}, {direction}")
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    axes[-1][0].set_xlabel("tokens")
    axes[0][0].set_ylabel("TFLOP/s")
    return figure


def plot_moe_layer(rows: Rows) -> plt.Figure:
    """Speedup over bf16 of forward and backward, over tokens."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, axes = plt.subplots(1, len(shapes), figsize=(5 * len(shapes), 4), squeeze=False, sharey=True)
    for axis, shape in zip(axes[0], shapes, strict=True):
        panel = [row for row in rows if row["shape"] == shape]
        for variant, routing in dict.fromkeys((row["variant"], row["routing"]) for row in panel):
            points = sorted(
                (int(row["tokens"]), float(row["speedup"]))
                for row in panel
                if (row["variant"], row["routing"]) == (variant, routing)
            )
            axis.plot(*zip(*points, strict=True), marker=".", label=f"{variant} ({routing})")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens")
        axis.set_title(shape)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("speedup over bf16, forward + backward")
    return figure


def plot_loss_curves(rows: Rows) -> plt.Figure:
    """Training and validation loss over steps, and how far each validation is from the first bf16 run's."""

    def curve(column: str) -> dict[int, float]:
        return {int(row["step"]): float(row[column]) for row in rows if row[column]}

    names = [column.removeprefix("train/") for column in rows[0] if column.startswith("train/")]
    validations = {name: curve(f"val/{name}") for name in names}
    control = validations[names[0]]
    figure, axes = plt.subplots(1, 3, figsize=(18, 5))
    for color, name in enumerate(names):
        train, style = curve(f"train/{name}"), "--" if name.startswith("bf16") else "-"
        axes[0].plot(train.keys(), train.values(), style, color=f"C{color}", linewidth=0.8, label=name)
        axes[1].plot(validations[name].keys(), validations[name].values(), style, color=f"C{color}", label=name)
        difference = {step: loss - control[step] for step, loss in validations[name].items()}
        axes[2].plot(difference.keys(), difference.values(), style, color=f"C{color}", marker=".", label=name)
    titles = ("training loss, of one batch", "validation loss", f"validation loss less that of {names[0]}")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0].legend()
    # At the first steps, from other initial weights, seeds are far apart, and nothing else would be seen.
    later = [abs(v[step] - control[step]) for v in validations.values() for step in v if step > max(control) / 10]
    if any(later):
        axes[2].set_ylim(-1.1 * max(later), 1.1 * max(later))
    return figure


PLOTS: dict[str, Callable[[Rows], plt.Figure]] = {
    "kernels.csv": plot_kernels,
    "grouped_mm.csv": plot_grouped_mm,
    "moe_layer.csv": plot_moe_layer,
    "loss_curves.csv": plot_loss_curves,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME.csv", help=f"of {', '.join(PLOTS)}")
    names = parser.parse_args().names or [name for name in PLOTS if (RESULTS / name).exists()]
    if unknown := [name for name in names if name not in PLOTS]:
        parser.error(f"there is no plot of {', '.join(unknown)}; there are plots of {', '.join(PLOTS)}")
    for name in names:
        with open(RESULTS / name, newline="") as f:
            rows = list(csv.DictReader(f))
        figure = PLOTS[name](rows)
        figure.suptitle(conditions(rows), fontsize=9)
        figure.tight_layout()
        target = (RESULTS / name).with_suffix(".png")
        figure.savefig(target, dpi=110)
        print(target)


if __name__ == "__main__":
    main()
