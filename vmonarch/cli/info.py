"""What is installed on this machine: `vmonarch info`."""

from __future__ import annotations

import argparse


def run_info(arguments: argparse.Namespace) -> None:
    """versions, devices, the embedded model, installed extras"""
    from vmonarch.configs import preset_names
    from vmonarch.pipelines.environment import environment, missing_packages
    from vmonarch.requirements import unsupported_versions

    facts = environment("cpu")
    rows = {"vmonarch": f"{facts['vmonarch']} (commit {facts['git_commit'] or 'unknown'})"}
    rows |= {key: facts[key] for key in ("python", "platform")}
    rows |= {name: found or "not installed" for name, found in (facts["packages"] | unsupported_versions()).items()}
    rows |= {**_devices(), "embedded model": _embedded_model()}
    rows |= {"attention methods": ", ".join(preset_names("attention")), "recipes": ", ".join(preset_names("recipes"))}
    for extra, missing in missing_packages().items():
        rows[f"extra {extra}"] = f"missing {', '.join(missing)}" if missing else "installed"
    for name, value in rows.items():
        print(f"{name:<{max(map(len, rows))}}  {value}")


def _devices() -> dict[str, str]:
    """Each device, and what "auto" means on it for a pipeline's half-precision tensors."""
    import torch

    from vmonarch.kernels.common.launch import auto_takes_kernels, why_not_triton
    from vmonarch.pipelines.environment import choose_dtype, device_name

    found = {}
    for device in map(torch.device, ["cpu"] + [f"cuda:{index}" for index in range(torch.cuda.device_count())]):
        probe = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device=device)
        kernels = "triton" if auto_takes_kernels(device) and why_not_triton(probe) is None else "torch"
        memory = ""
        if device.type == "cuda":
            memory = f", {torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB"
        dtype = str(choose_dtype("auto", device)).removeprefix("torch.")
        found[str(device)] = f"{device_name(device)}{memory}: {kernels} attention, {dtype}"
    return found


def _embedded_model() -> str:
    from vmonarch.pipelines.embedded import embedded_model_path
    from vmonarch.pipelines.model_folder import folder_bytes

    try:
        folder = embedded_model_path()
    except FileNotFoundError as error:
        return str(error)
    return f"{folder_bytes(folder) / 2**20:.1f} MiB at {folder}"
