"""The study of few steps: what the pool holds, how students are sampled, and its table."""

import dataclasses
import itertools
import types

import torch

from vmonarch.eval.studies import few_steps
from vmonarch.pipelines.schedulers import few_step_scheduler

STUDY = dataclasses.replace(few_steps.QUICK, teacher_steps=2, pool=2, chunk=2, num_frames=1)


def test_students_learn_the_levels_that_they_are_sampled_at():
    scheduler = few_step_scheduler("euler", few_steps.EMBEDDED_SETTINGS.flow_shift)
    scheduler.set_timesteps(4)
    torch.testing.assert_close(scheduler.sigmas, torch.tensor(few_steps.noise_levels(4)))


def test_a_pool_holds_ways_of_the_guided_teacher_and_then_of_the_student():
    distillation = few_steps.Distillation(STUDY, 2, "cpu", compile=False)

    def velocity(model, x, sigma, text):
        if model is not distillation.teacher:
            return 0.5 * x
        empty = (text == distillation.empty).flatten(1).all(1).view(-1, 1, 1, 1, 1)
        return torch.where(empty, -0.05, -0.1) * x

    distillation.velocity = velocity
    # With a guidance of 4 the teacher's velocity is -0.25 x.
    arrive = lambda x, h: x * (1 - 0.25 * h + (0.25 * h) ** 2 / 2)
    h = [after - sigma for sigma, after in itertools.pairwise(distillation.levels)]
    close = {"atol": 2e-2, "rtol": 2e-2}
    for student, lead in ((None, arrive), (object(), lambda x, h: x * (1 + 0.5 * h))):
        before = distillation.states[:, 0].clone()
        distillation.fill(student)
        first, second = distillation.states.float().unbind(1)
        assert not first.equal(before.float()), "new noise took the place of the oldest"
        torch.testing.assert_close(second, lead(first, h[0]), **close)
        for step, x in enumerate((first, second)):
            # From wherever the student came, the teacher goes on.
            found = distillation.velocities[:, step].float()
            torch.testing.assert_close(found, (arrive(x, h[step]) - x) / h[step], **close)


def test_the_teacher_arrives_by_a_method_of_second_order():
    """Which is exact where the velocity grows along with the noise level."""
    distillation = types.SimpleNamespace(study=STUDY, n=2, guided=lambda x, sigma, text: torch.full_like(x, sigma))
    x = torch.ones(1, 1, 1, 1, 1, dtype=torch.float64)
    sigma, after, _ = few_steps.noise_levels(2)
    end = few_steps.Distillation.arrive(distillation, x, 0, None)  # type: ignore[arg-type]
    torch.testing.assert_close(end, x + (after**2 - sigma**2) / 2)


def test_the_table_shows_every_row():
    rows = [
        {"model": "teacher", "steps": 50, "method": "full", "work": 1.0, "prompt_score": 0.9},
        {"model": "teacher", "steps": 50, "method": "vmonarch", "work": 0.25, "prompt_score": 0.7, "psnr": 20.0},
        {"model": "teacher, 4 steps", "steps": 4, "method": "full", "work": 1.0, "prompt_score": 0.6, "psnr": 18.5},
        {"model": "student of full, 8 steps", "steps": 8, "method": "vmonarch", "work": 0.5, "prompt_score": 0.75,
         "psnr": 21.5},
        {"model": "student of full, 4 steps", "steps": 4, "method": "vmonarch", "work": 0.6, "prompt_score": 0.8,
         "psnr": 22.5},
    ]  # fmt: skip
    study = {"prompts": 48, "sampled_steps": 50, "steps": (8, 4)}
    about = {"study": study, "hardware": "a GPU", "date": "2026-11-26", "command": "run"}
    table = few_steps.few_steps_table({"rows": rows} | about)
    assert (
        "| model | attention | 8 steps: attention FLOPs | PSNR dB | prompt score | 4 steps: attention FLOPs |" in table
    )
    assert "| teacher | full | – | – | – | 100.0 % | 18.50 | 60.0 % |" in table
    assert "| student of full | vmonarch | 50.0 % | 21.50 | 75.0 % | 60.0 % | 22.50 | 80.0 % |" in table
    assert "in 50 steps with guidance: full 90.0 %; vmonarch 70.0 %, 20.00 dB. a GPU" in table
    assert "48 prompts" in table and "Made by `run`" in table
