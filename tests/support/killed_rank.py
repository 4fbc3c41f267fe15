"""What torchrun starts in `test_context_parallel.py`: a pipeline on two ranks, the second of which is killed."""

import datetime
import os
import signal

import tiny_wan as tiny
import torch
import torch.distributed as dist
from context_parallel_worker import Rank

import vmonarch


def main():
    rank = int(os.environ["RANK"])
    # diffusers takes it for granted that there is an accelerator.
    torch.accelerator.device_count = lambda: 1
    dist.init_process_group("gloo", timeout=datetime.timedelta(hours=1))
    pipe = tiny.pipeline("t2v")
    vmonarch.apply(pipe, vmonarch.VMonarchProcessor())
    Rank().enable(pipe.transformer)

    def step_ended(pipe, step, timestep, kwargs):
        print(f"rank {rank}, process {os.getpid()}: step {step} has ended", flush=True)
        if rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return kwargs

    try:
        tiny.generate(pipe, steps=4, callback_on_step_end=step_ended)
    except RuntimeError:
        # gloo sees that a connection is closed. NCCL waits for the rest of its timeout.
        signal.pause()


if __name__ == "__main__":
    main()
