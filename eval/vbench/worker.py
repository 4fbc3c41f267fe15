"""Runs VBench inside its environment: `python -I worker.py job.json`.

It imports nothing of vmonarch, because that environment has other versions of what vmonarch needs.
"""

import json
import sys
from pathlib import Path


def main(job_path: str) -> None:
    """Score the videos of a job; the package writes the results into the job's folder `output`."""
    import torch
    import vbench

    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    full_info = Path(vbench.__file__).with_name("VBench_full_info.json")
    # A device object, not its name, as in the package's own command: with the name "cuda", motion_smoothness scales
    # videos down depending on the GPU's memory.
    benchmark = vbench.VBench(torch.device(job["device"]), str(full_info), job["output"])
    # `local`: models come from the folder of weights, not from the hub.
    benchmark.evaluate(
        videos_path=job["videos"],
        name="scores",
        prompt_list=job["prompts"],
        dimension_list=[job["dimension"]],
        local=True,
        mode="custom_input",
    )


if __name__ == "__main__":
    main(sys.argv[1])
