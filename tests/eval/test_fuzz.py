"""The fuzz study: it passes today, it finds planted bugs, and it loses no case to a crash."""

import itertools
import multiprocessing
import os
import time

import pytest
import torch

from vmonarch.eval.studies import fuzz
from vmonarch.kernels.common.launch import interpreted
from vmonarch.kernels.flash_bias import api as flash_bias
from vmonarch.kernels.flash_entropy import reference as flash_entropy

OPS = [op for op in fuzz.OPS if op != "processor"]
PLAIN = {"device": "cpu", "configurations": None}


def first_failure(numbers, ops, implementation="torch"):
    outcomes = (fuzz.outcome_of(n, implementation, ops=ops, **PLAIN) for n in numbers)
    return next((outcome for outcome in outcomes if outcome.failure), None)


def test_plain_torch_is_as_precise_as_its_dtype():
    assert first_failure(range(37), OPS) is None


def test_processors_too():
    assert first_failure(range(2), ["processor"]) is None


@pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 when triton is imported")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("op", ["window_attention", "flash_entropy_attention", "norm_rotary", "residual"])
def test_kernels_too(op):
    assert first_failure(range(1), [op], "triton") is None


def test_a_noisy_sum_errs_by_the_size_of_its_terms():
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(48)
    with fuzz.Noise(0.0, 0):
        errors = torch.cat([(signs * 3).sum()[None], (3 * signs)[None] @ torch.ones(96, 1).double()[:, 0]]).abs()
    assert (errors > 0).all() and (errors <= 288 * torch.finfo(torch.float32).eps).all()


def test_a_case_is_a_function_of_its_number():
    for number in range(40):
        one, two = (fuzz.make_case(number, ops=OPS) for _ in range(2))
        assert one.describe() == two.describe()
        for name, x in one.tensors.items():
            assert x.stride() == two.tensors[name].stride()
            assert torch.equal(x.nan_to_num(), two.tensors[name].nan_to_num())


def test_configurations_decide_what_kernels_are_compiled_for():
    cases = [fuzz.make_case(number, ops=OPS, configurations=7) for number in (3, 10, 17)]
    assert len({(case.op, case.dtype, case.forward_only or case.nan) for case in cases}) == 1
    assert len({case.tensors["query"].shape[3] for case in cases}) == 1
    assert len({case.tensors["query"].shape[1] for case in cases}) > 1


def ignore_strides(monkeypatch):
    """Tensors are read as if they were contiguous."""
    right = flash_entropy.to_groups
    wrong = lambda x: right(x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()))
    monkeypatch.setattr("vmonarch.kernels.flash_bias.reference.to_groups", wrong)
    return "flash_bias_attention"


def leave_the_last_row(monkeypatch):
    """The last row of the result is never written; in most processes it would hold what was there before."""
    right = flash_bias.flash_bias_attention_reference

    def wrong(query, *args, **options):
        out, lse = right(query, *args, **options)
        unwritten = torch.empty_like(out)
        unwritten[:, : max(1, out.shape[1] - 1)] = out[:, : max(1, out.shape[1] - 1)]
        return (out if query.dtype == torch.float64 else unwritten), lse

    monkeypatch.setattr(flash_bias, "flash_bias_attention_reference", wrong)
    return "flash_bias_attention"


def lose_the_gradient(monkeypatch):
    """No gradient reaches the key."""
    right = flash_bias.flash_bias_attention_reference

    def wrong(query, key, *args, **options):
        return right(query, key if query.dtype == torch.float64 else key.detach(), *args, **options)

    monkeypatch.setattr(flash_bias, "flash_bias_attention_reference", wrong)
    return "flash_bias_attention"


def hide_nan(monkeypatch):
    right = flash_bias.flash_bias_attention_reference

    def wrong(query, *args, **options):
        out, lse = right(query, *args, **options)
        return (out if query.dtype == torch.float64 else out.nan_to_num(0.0)), lse

    monkeypatch.setattr(flash_bias, "flash_bias_attention_reference", wrong)
    return "flash_bias_attention"


def round_products(monkeypatch):
    """Products of float32 tensors in bfloat16, as under autocast."""
    right = flash_entropy.to_groups
    wrong = lambda x: right(x if x.dtype == torch.float64 else x.bfloat16())
    monkeypatch.setattr("vmonarch.kernels.flash_bias.reference.to_groups", wrong)
    return "flash_bias_attention"


@pytest.mark.parametrize(
    "plant", [ignore_strides, leave_the_last_row, lose_the_gradient, hide_nan, round_products], ids=lambda f: f.__name__
)
def test_it_finds_a_planted_bug(monkeypatch, plant):
    op = plant(monkeypatch)
    # NaN is planted in one case of twelve.
    assert first_failure(range(40), [op]) is not None


def test_a_process_keeps_to_its_configurations(monkeypatch):
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(fuzz, "outcome_of", lambda number, **options: fuzz.Outcome(number, str(os.getpid()), 0.0))
    monkeypatch.setattr(fuzz.multiprocessing, "get_context", lambda method: fork)
    options = {"device": "cpu", "implementation": "torch", "configurations": 3, "ops": list(fuzz.OPS)}
    outcomes, left = fuzz.run(range(18), processes=2, seconds=60, patience=9.0, **options)
    assert left == 0 and sorted(outcome.number for outcome in outcomes) == list(range(18))
    for process in {outcome.op for outcome in outcomes}:
        own = [outcome.number % 3 == 1 for outcome in outcomes if outcome.op == process]
        # It goes on with those of the other once it has no more.
        assert sum(one != two for one, two in itertools.pairwise(own)) <= 1


def test_a_crash_and_a_hang_cost_one_case_each(monkeypatch):
    def outcome_of(number, *, implementation, **options):
        if number == 3:
            os._exit(7)
        if number == 5:
            time.sleep(60)
        return fuzz.Outcome(number, "window_attention", 0.5)

    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(fuzz, "outcome_of", outcome_of)
    monkeypatch.setattr(fuzz.multiprocessing, "get_context", lambda method: fork)
    options = {"device": "cpu", "implementation": "torch", "configurations": None, "ops": list(fuzz.OPS)}
    outcomes, left = fuzz.run(range(9), processes=2, seconds=60, patience=1.0, **options)
    assert left == 0 and sorted(outcome.number for outcome in outcomes) == list(range(9))
    failed = {outcome.number: outcome.failure for outcome in outcomes if outcome.failure}
    assert failed == {3: "its process ended with exit code 7", 5: "no result after 1 s"}
    assert "window_attention" in fuzz.table(outcomes)


def test_no_case_starts_after_the_time_is_up(monkeypatch):
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(fuzz.multiprocessing, "get_context", lambda method: fork)
    outcomes, left = fuzz.run(range(5), processes=1, seconds=0, patience=9, **PLAIN, ops=OPS, implementation="torch")
    assert not outcomes and left == 5
