"""A plan as text. Everything shown is in the plan's own values, so that JSON holds every number."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

PARTS = {
    "weights": "weights",
    "fp8": "FP8 copies",
    "gradients": "gradients (fp32)",
    "optimizer": "optimizer",
    "average": "weight average",
    "activations": "activations",
    "head": "output layer",
    "kv_cache": "KV cache",
    "rows": "rows",
    "buffers": "buffers",
}
KEPT = {
    "weights": "weights",
    "fp8": "FP8 copies",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "average": "average",
}
TIMES = ("compute", "launch", "tensor", "context", "expert", "pipeline", "bubble", "data", "host", "other")


def print_plan(plan: dict[str, Any], console: Console) -> None:
    """Write every table, then what does not fit and what mends it."""
    _headline(plan, console)
    console.print(_models(plan))
    for name, ranks in _shown(plan):
        console.print(_persistent(name, ranks))
        console.print(_phases(name, ranks))
    console.print(_work(plan))
    console.print(_times(plan))
    _sources(plan, console)
    _verdict(plan, console)
    if plan.get("search"):
        print_search(plan["search"], console)


def size(value: float) -> str:
    """Bytes in binary units: ``38.08 GiB``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:.0f} B"


def count(value: float) -> str:
    """A large number in steps of a thousand: ``70.55 G``."""
    for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Seconds with a precision that fits: ``85.3 s``, ``1.2 ms``."""
    if seconds == 0:
        return "0"
    if seconds >= 0.1:
        return f"{seconds:.1f} s"
    if seconds >= 0.00995:
        # Two digits of more would be written with an exponent.
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds * 1e3:.2g} ms" if seconds >= 0.995e-4 else f"{seconds * 1e6:.2g} us"


def _headline(plan: dict[str, Any], console: Console) -> None:
    layout, hardware, batches = plan["layout"], plan["hardware"], plan["batches"]
    parts = [f"TP {layout['tensor_model_parallel_size']}", f"PP {layout['pipeline_model_parallel_size']}"]
    if layout["context_parallel_size"] > 1:
        parts.append(f"CP {layout['context_parallel_size']}")
    parts.append(f"DP {layout['data_parallel_size']}")
    if layout["expert_model_parallel_size"] > 1:
        parts[-1] += f", experts over EP {layout['expert_model_parallel_size']}"
    text = f"{plan['kind']} on {layout['world_size']} x {hardware['name']}: {' x '.join(parts)}"
    if layout["virtual_pipeline_model_parallel_size"]:
        text += f", {layout['virtual_pipeline_model_parallel_size']} virtual stages a rank"
    text += ", sequence parallel" if layout["sequence_parallel"] else ""
    text += f", {plan['precision']}" + (f", FP8 ({plan['fp8']})" if plan["fp8"] else "")
    if layout["critic_ranks"]:
        text += f", critic and reward models on {layout['critic_ranks']} ranks of their own"
    text += ", distributed optimizer" if plan["distributed_optimizer"] else ""
    if plan["recompute"] != "none":
        text += f", {'layers' if plan['recompute'] == 'full' else plan['recompute']} recomputed"
    console.print(Text(text, style="bold"))
    train = batches["train"]
    lines = [
        f"an iteration: {batches['rows']} rows, {batches['steps']} optimizer steps of {batches['minibatch']} rows, "
        f"micro-batches of {train['count']} x {train['width']} tokens (mean {batches['train_mean']['width']})"
    ]
    if batches["rollout"]:
        r = batches["rollout"]
        lines.append(
            f"prompts of up to {r['longest_prompt']} tokens (mean {r['mean_prompt']}), responses of up to "
            f"{r['longest_response']} (mean {r['mean_response']}), {r['slots']} rows generated at once"
        )
    for line in lines:
        console.print(Text(line))


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _models(plan: dict[str, Any]) -> Table:
    table = _table("Models", "role", "parameters", "head", "trained", "TP", "PP", "DP", "first rank", "middle", "last")
    for model in plan["models"]:
        stages = model["stages"]
        active = model["active_parameters"]
        middle = f"{stages[len(stages) // 2]['parameters']:,}" if len(stages) > 2 else ""
        last = f"{stages[-1]['parameters']:,}" if len(stages) > 1 else ""
        table.add_row(
            model["role"] + (" (FP8)" if model["fp8"] else ""),
            f"{model['parameters']:,}" + (f" ({active:,} active)" if active < model["parameters"] else ""),
            "value" if model["head"] == "value" else "language",
            "yes" if model["trained"] else "frozen",
            str(model["tensor_model_parallel_size"]),
            str(model["pipeline_model_parallel_size"]),
            str(model["data_parallel_size"]),
            f"{stages[0]['parameters']:,}",
            middle,
            last,
        )
    return table


def _shown(plan: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """First, one middle, and last of the ranks that differ; of each part where parts hold other models."""
    parts: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for each in plan["ranks"]:
        parts.setdefault(tuple(each["models"]), []).append(each)
    return [found for ranks in parts.values() for found in _shown_of_part(ranks)]


def _shown_of_part(ranks: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    chosen = {0: "first", len(ranks) - 1: "last"} if len(ranks) > 1 else {0: ""}
    if len(ranks) > 2:
        chosen[1] = "middle"
    found = []
    for index in sorted(chosen):
        each = ranks[index]
        which = f"ranks {each['first']}-{each['last']}" if each["last"] > each["first"] else f"rank {each['first']}"
        stage = f"{chosen[index]} stage, " if chosen[index] else ""
        found.append((f"{stage}{which}", each))
    return found


def _persistent(name: str, ranks: dict[str, Any]) -> Table:
    parts = [key for key in KEPT if any(model[key] for model in ranks["models"].values())]
    table = _table(f"Models on the {name}", "role", "layers", "parameters", *(KEPT[key] for key in parts), "total")
    for role, model in ranks["models"].items():
        cells = [size(model[key]) if model[key] else "" for key in parts]
        table.add_row(role, str(model["layers"]), f"{model['parameters']:,}", *cells, size(model["total"]))
    sums = [size(sum(model[key] for model in ranks["models"].values())) for key in parts]
    table.add_row("all", "", "", *sums, size(ranks["persistent"]), style="bold")
    return table


def _phases(name: str, ranks: dict[str, Any]) -> Table:
    phases = ranks["phases"]
    table = _table(f"Memory on the {name}", "", *phases)
    for key, label in PARTS.items():
        values = [phase[key] for phase in phases.values()]
        if any(values):
            table.add_row(label, *[size(value) if value else "" for value in values])
    table.add_row("total", *[size(phase["total"]) for phase in phases.values()], style="bold")
    return table


def _work(plan: dict[str, Any]) -> Table:
    table = _table(
        "FLOPs and traffic of an iteration (of the rank that has most)",
        "phase",
        "FLOPs, all ranks",
        "FLOPs, a rank",
        "TP sent",
        "PP sent",
        "DP sent",
        "CP sent",
        "EP sent",
    )
    for phase in [name for name in plan["seconds"] if name in plan["flops"] or name in plan["traffic"]]:
        work = plan["flops"].get(phase, {"all_ranks": 0.0, "rank": 0.0})
        sent = plan["traffic"].get(phase, {})
        table.add_row(
            phase,
            count(work["all_ranks"]),
            count(work["rank"]),
            *[size(sent.get(kind, 0.0)) for kind in ("tensor", "pipeline", "data", "context", "expert")],
        )
    return table


def _times(plan: dict[str, Any]) -> Table:
    table = _table("Time, estimated", "phase", *TIMES, "total")
    for phase, parts in plan["seconds"].items():
        label = "save (a checkpoint)" if phase == "save" else phase
        table.add_row(label, *[duration(parts[name]) if parts[name] else "" for name in (*TIMES, "total")])
    table.add_row("iteration", *[""] * len(TIMES), duration(plan["iteration_seconds"]), style="bold")
    return table


def _sources(plan: dict[str, Any], console: Console) -> None:
    hardware, assumed = plan["hardware"], plan["efficiency"]
    host = max(ranks["host_bytes_of_a_save"] for ranks in plan["ranks"])
    lines = [
        f"{plan['tokens_per_second']:,.0f} tokens per second; a checkpoint takes {size(plan['checkpoint_bytes'])} on "
        f"disk, and up to {size(host)} of host memory on a rank",
        *_host(plan),
        f"hardware: {hardware['source']}",
        f"assumed: {assumed['flops']:.0%} of the FLOPS, {assumed['bandwidth']:.0%} of the memory bandwidth, "
        f"{assumed['link']:.0%} of links, {duration(assumed['link_seconds'])} and "
        f"{duration(assumed['network_seconds'])} a message inside and between machines, "
        f"{duration(assumed['layer_seconds'])} at least a layer, "
        f"{size(assumed['disk'])}/s to disk; times are for comparing layouts",
    ]
    for line in lines:
        console.print(Text(line))


def _host(plan: dict[str, Any]) -> list[str]:
    moved = plan["offload"]
    if moved is None:
        return []
    return [
        f"offloaded at times ({', '.join(moved['roles'])}): up to {size(moved['rank_bytes'])} of pinned host memory on "
        f"a rank, {size(moved['machine_bytes'])} on a machine of {plan['hardware']['gpus_per_node']} GPUs, for the "
        f"whole run; the link to the host is busy for {duration(moved['link_seconds'])} of an iteration, "
        f"{duration(moved['waiting_seconds'])} of which are waited for"
    ]


def _verdict(plan: dict[str, Any], console: Console) -> None:
    memory = plan["memory"]
    first, last = memory["peak_ranks"]
    where = f"ranks {first}-{last}" if last > first else f"rank {first}"
    limit = (
        f"{size(memory['limit'])} ({size(memory['gpu'])} less {size(memory['reserve'])} for CUDA, NCCL and fragments)"
    )
    peak = f"The largest peak is {size(memory['peak'])}, in {memory['peak_phase']} on {where}"
    if memory["fits"]:
        console.print(Text(f"FITS. {peak}, of {limit}.", style="bold green"))
        return
    console.print(Text(f"DOES NOT FIT. {peak}, {size(memory['short'])} over {limit}.", style="bold red"))
    if not plan["mends"]:
        console.print(Text("None of the changes that were tried makes it fit; use more or larger GPUs."))
        return
    table = _table("Each of these makes it fit (tried)", "change", "peak", "an iteration")
    for mend in plan["mends"]:
        table.add_row(Text(" ".join(mend["change"])), size(mend["peak"]), duration(mend["iteration_seconds"]))
    console.print(table)


def print_search(found: dict[str, Any], console: Console) -> None:
    """Write what a search found."""
    console.print(Text(
        f"{found['tried']} layouts tried, {found['valid']} work with these models and batches, {found['fitting']} fit; "
        f"the smallest peak is {size(found['smallest_peak'])}."
    ))  # fmt: skip
    if not found["layouts"]:
        return
    table = _table("The fastest that fit", "TP", "PP", "DP", "SP", "micro-batch", "peak", "an iteration", "overrides")
    for layout in found["layouts"]:
        table.add_row(
            str(layout["tensor_model_parallel_size"]),
            str(layout["pipeline_model_parallel_size"]),
            str(layout["data_parallel_size"]),
            "yes" if layout["sequence_parallel"] else "no",
            str(layout.get("micro_batch_size", "")),
            size(layout["peak"]),
            duration(layout["iteration_seconds"]),
            Text(" ".join(layout["overrides"])),
        )
    console.print(table)
