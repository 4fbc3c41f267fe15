"""Students of few steps: what the pool holds, and a student that is sampled as users sample it."""

import dataclasses
import itertools
import types

import pytest
import torch

from vmonarch.cli import main
from vmonarch.eval.studies import few_steps
from vmonarch.pipelines.schedulers import few_step_scheduler

SIZES = dataclasses.replace(few_steps.QUICK, teacher_steps=2, pool=2, chunk=2, num_frames=1)


def test_students_learn_the_levels_that_they_are_sampled_at():
    scheduler = few_step_scheduler("euler", few_steps.EMBEDDED_SETTINGS.flow_shift)
    scheduler.set_timesteps(4)
    torch.testing.assert_close(scheduler.sigmas, torch.tensor(few_steps.noise_levels(4)))


def test_a_pool_holds_ways_of_the_guided_teacher_and_then_of_the_student():
    distillation = few_steps.Distillation(SIZES, 2, "cpu")

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
    distillation = types.SimpleNamespace(sizes=SIZES, n=2, guided=lambda x, sigma, text: torch.full_like(x, sigma))
    x = torch.ones(1, 1, 1, 1, 1, dtype=torch.float64)
    sigma, after, _ = few_steps.noise_levels(2)
    end = few_steps.Distillation.arrive(distillation, x, 0, None)
    torch.testing.assert_close(end, x + (after**2 - sigma**2) / 2)


@pytest.mark.deep
def test_a_student_is_a_lora_file_that_others_start_from_and_commands_take(tmp_path, capsys):
    first, second = tmp_path / "8.safetensors", tmp_path / "4.safetensors"
    words = ["--quick", "--device", "cpu", "--output"]
    assert few_steps.main([*words, str(first), "--steps", "8"]) == 0
    assert few_steps.main([*words, str(second), "--steps", "4", "--start", str(first), "--attention", "vmonarch"]) == 0
    small = ["--num-frames", "9", "--height", "32", "--width", "32", "--guidance", "1", "--scheduler", "euler"]
    words = ["a red circle", *small, "--steps", "4", "--lora", str(second), "--output-dir", str(tmp_path / "out")]
    assert main(["generate", *words, "--quiet"]) == 0
    with pytest.raises(SystemExit):
        few_steps.main(["--steps", "3", "--output", str(first)])
    assert "--steps must be a divisor of 16, got 3" in capsys.readouterr().err
