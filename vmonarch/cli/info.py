"""`vmonarch info` and `completion`."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any


def add_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")
    about = (
        "also the memory that refresh takes, for a model as in `vmonarch bench e2e` and frames x height x width:"
        " wan2.1-14b 93x704x1280"
    )
    parser.add_argument("--residuals", nargs=2, metavar=("MODEL", "SIZE"), help=about)


def run_info(arguments: argparse.Namespace) -> None:
    """versions, devices, the embedded model, installed extras"""
    facts = collect()
    if arguments.residuals is not None:
        facts["residuals"] = _residuals(*arguments.residuals)
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return
    rows = {"vmonarch": f"{facts['vmonarch']} (commit {facts['git_commit'] or 'unknown'})"}
    rows |= {key: facts[key] for key in ("python", "platform")}
    rows |= {name: found or "not installed" for name, found in (facts["packages"] | facts["unsupported"]).items()}
    for device in facts["devices"]:
        memory = f", {device['memory_bytes'] / 2**30:.0f} GiB" if device["memory_bytes"] else ""
        rows[device["device"]] = f"{device['name']}{memory}: {device['implementation']} attention, {device['dtype']}"
    model = facts["embedded_model"]
    rows["embedded model"] = model["problem"] or f"{model['bytes'] / 2**20:.1f} MiB at {model['path']}"
    rows |= {"attention methods": ", ".join(facts["attention_methods"]), "recipes": ", ".join(facts["recipes"])}
    for extra, packages in facts["extras"].items():
        missing = [name for name, version in packages.items() if version is None]
        rows[f"extra {extra}"] = f"missing {', '.join(missing)}" if missing else "installed"
    if found := facts.get("residuals"):
        sizes = ", ".join(f"{size / 2**30:.1f} GiB in {dtype}" for dtype, size in found["bytes"].items())
        rows["residuals"] = f"{sizes}, with guidance ({found['tokens']} tokens, {found['layers']} layers)"
    for name, value in rows.items():
        print(f"{name:<{max(map(len, rows))}}  {value}")


def collect() -> dict[str, Any]:
    """Versions, devices with the implementation each would use, the embedded model, methods and extras.

    `unsupported` tells of versions that vmonarch does not support.
    """
    import torch

    from vmonarch.configs.methods import method_names, recipe_names
    from vmonarch.kernels.common.launch import auto_takes_kernels, why_not_triton
    from vmonarch.pipelines.environment import EXTRAS, choose_dtype, device_name, environment, package_versions
    from vmonarch.pipelines.model_folder import ModelError, find_model, folder_bytes
    from vmonarch.requirements import unsupported_versions

    devices = []
    for device in map(torch.device, ["cpu"] + [f"cuda:{index}" for index in range(torch.cuda.device_count())]):
        # What "auto" means there, for the half-precision tensors of a pipeline.
        probe = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device=device)
        kernels = auto_takes_kernels(device) and why_not_triton(probe) is None
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        about = {"device": str(device), "name": device_name(device), "memory_bytes": memory}
        dtype = str(choose_dtype("auto", device)).removeprefix("torch.")
        devices.append(about | {"dtype": dtype, "implementation": "triton" if kernels else "torch"})
    model: dict[str, Any] = {"path": None, "bytes": None, "problem": None}
    try:
        folder = find_model("embedded").path
        model |= {"path": str(folder), "bytes": folder_bytes(folder)}
    except ModelError as error:
        model["problem"] = str(error)
    facts = environment("cpu")
    return {
        **{key: facts[key] for key in ("vmonarch", "git_commit", "python", "platform", "packages", "cuda")},
        "unsupported": unsupported_versions(),
        "devices": devices,
        "embedded_model": model,
        "attention_methods": method_names(),
        "recipes": recipe_names(),
        "extras": {extra: package_versions(names) for extra, names in EXTRAS.items()},
    }


def _residuals(model_name: str, size: str) -> dict[str, Any]:
    """Bytes of the residuals of all layers and both guidance branches, by `vmonarch.Refresh.dtype`."""
    from vmonarch.configs import InputError
    from vmonarch.eval.wan_models import read_model
    from vmonarch.kernels.residual.api import DTYPES, residual_bytes

    if re.fullmatch(r"\d+x\d+x\d+", size) is None:
        raise InputError("residuals", f"must be a model and frames x height x width, got {size!r}")
    model = read_model(model_name)
    shape = model.transformer
    tokens = model.grid([int(side) for side in size.split("x")], argument="residuals").tokens
    heads, head_dim, layers = (shape[name] for name in ("num_attention_heads", "attention_head_dim", "num_layers"))
    sizes = {dtype: 2 * layers * residual_bytes(1, tokens, heads, head_dim, dtype) for dtype in DTYPES}
    return {"tokens": tokens, "layers": layers, "bytes": sizes}


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="that the script is for")


def run_completion(arguments: argparse.Namespace) -> None:
    """a script that completes commands in a shell

    examples:
      source <(vmonarch completion bash)                                       in ~/.bashrc
      vmonarch completion zsh > ~/.zfunc/_vmonarch                             a folder of $fpath
      vmonarch completion fish > ~/.config/fish/completions/vmonarch.fish
    """
    import shtab

    from vmonarch.cli import build_parser

    print(shtab.complete(build_parser(), arguments.shell))
    if arguments.shell == "bash":
        # Names of files where there is nothing else to complete.
        print("compopt -o default vmonarch")
