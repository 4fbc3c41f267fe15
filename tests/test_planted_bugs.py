"""The tests of the mathematics and of the kernels can fail: each bug below, planted in a copy, makes them fail."""

import os
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = "kernels/monarch/reference.py"
MERGE = "kernels/merge/reference.py"
MERGE_KERNELS = "kernels/merge/kernels.py"
SOFTMAX = "kernels/flash_entropy/reference.py"
BLOCKS = "kernels/monarch/blocks.py"
ONLINE = "kernels/common/softmax.py"
TILES = "kernels/common/tiles.py"
PLACES = "kernels/monarch/places.py"
R_STEP = "kernels/monarch/r_step.py"
L_STEP = "kernels/monarch/l_step.py"
FUSED = "kernels/monarch/fused.py"
LAST_R_STEP = "kernels/monarch/last_r_step.py"
BIAS_REFERENCE = "kernels/flash_bias/reference.py"
BIAS_FORWARD = "kernels/flash_bias/forward.py"
BIAS_BACKWARD = "kernels/flash_bias/backward.py"
BIAS_OP = "kernels/flash_bias/op.py"
BIAS_FACTORS = "kernels/flash_bias/factors.py"
EXACT_BIAS = "bias/exact.py"
SVD_BIAS = "bias/svd.py"
FEATURES = "kernels/taylor/feature_maps.py"
LINEAR = "kernels/taylor/reference.py"
LINEAR_KERNELS = "kernels/taylor/kernels.py"
LINEAR_OP = "kernels/taylor/op.py"
NEIGHBOURS = "kernels/window/neighbours.py"
WINDOW = "kernels/window/reference.py"
WINDOW_KERNELS = "kernels/window/kernels.py"
NORM_KERNELS = "kernels/norm_rotary/kernels.py"
NORM_OP = "kernels/norm_rotary/op.py"
RESIDUAL = "kernels/residual/reference.py"
TWO_RESOLUTIONS = "kernels/two_resolution/reference.py"
SELECTION = "kernels/two_resolution/selection.py"
TILE_KERNELS = "kernels/two_resolution/kernels.py"
TILE_OP = "kernels/two_resolution/op.py"
LAUNCH = "kernels/common/launch.py"
RESIDUAL_KERNELS = "kernels/residual/kernels.py"
OBJECTIVE = "finetune/objective.py"
SIMILARITY = "eval/similarity.py"
SUMMARY = "eval/summary.py"
LOADER = "finetune/data/loader.py"
CHECKPOINTS = "finetune/checkpoints.py"
TRAINER = "finetune/trainer.py"
PLAN = "plan.py"
PROCESSORS = "processors.py"
FLOPS = "flops.py"
DIAGNOSIS = "eval/calibrate/diagnosis.py"
PLANNING = "eval/calibrate/planning.py"
REFINING = "eval/calibrate/refining.py"
BASED = "based.py"
ADAPTERS = "adapters.py"
TRAINED = "finetune/models.py"
CONTROLS = "eval/controls.py"
CONTEXT_PARALLEL = "context_parallel.py"
RESIDUALS = "residuals.py"
FAMILIES = "families.py"
STEPS = "steps.py"
ARGUMENTS = "arguments.py"
SEAM = "seam.py"
SEQUENCE = "sequence.py"
FORWARD_CONTEXT = "forward_context.py"
VIDEO_PROCESSOR = "video_processor.py"
PARALLELISM = "parallelism.py"
SPREAD = "spread.py"

# name -> (file in the package, text in it, what the bug makes of it)
BUGS = {
    "y-from-keys": (REFERENCE, "outs[1].unflatten(0, lead)", "outs[0].unflatten(0, lead)"),
    "entropy-without-z-aL": (REFERENCE, "cL = (z * aL).sum(-1) - lse", "cL = -lse"),
    "entropy-gradient-flows": (REFERENCE, "cL if entropy_grad else cL.detach()", "cL"),
    "clamp-dropped": (REFERENCE, "max(options.min_mass, torch.finfo(cR.dtype).tiny)", "torch.finfo(cR.dtype).tiny"),
    "cR-over-the-wrong-axis": (REFERENCE, "L.sum(-2)", "L.sum(-1)"),
    "exact-blocks-counted-twice": (REFERENCE, "Z = Z.masked_fill(exact, -torch.inf)", "pass"),
    "l-steps-never-aware": (REFERENCE, "exact_table if aware else None", "None"),
    "exact-weight-forgotten": (REFERENCE, "lse_exact if aware else None", "None"),
    "padded-queries-count": (REFERENCE, "L = L * query_valid.unsqueeze(-1)", "pass"),
    "padded-keys-attended": (REFERENCE, "masked_fill(~present, -torch.inf)", "masked_fill(~present, 0.0)"),
    "scale-forgotten": (REFERENCE, "query.to(compute_dtype) * scale", "query.to(compute_dtype)"),
    "rescale-forgotten": (SOFTMAX, "row_max + torch.log(row_sum)", "torch.log(row_sum)"),
    "normalisation-forgotten": (SOFTMAX, "return lse, *(p @ value / row_sum", "return lse, *(p @ value"),
    "tail-rows-skipped": (SOFTMAX, "for r in range(0, M, rows)", "for r in range(0, max(rows, M - rows), rows)"),
    "entropy-sign": (SOFTMAX, "entropy = -(", "entropy = ("),
    "pooled-keys-count-once": (BLOCKS, "torch.log(count)", "torch.log(count.clamp(max=1))"),
    "tiles-of-equal-size": (BLOCKS, "p * H // tiles[0]", "p * (H // tiles[0])"),
    "pre-is-post": (BLOCKS, 'missing if padding == "pre" else 0', "0"),
    "second-frame-recomputed": ("exact.py", "ExactBlocks(rows=(0,),", "ExactBlocks(rows=(1,),"),
    "band-one-short": ("exact.py", "abs(l - k) <= band", "abs(l - k) < band"),
    "rounding-inward": (BLOCKS, "not attended.isdisjoint(block)", "attended.issuperset(block)"),
    "merge-without-shift": (MERGE, "torch.exp(lses - shift)", "torch.exp(lses)"),
    "merge-hides-nan": (MERGE, "torch.where(share == 0,", "torch.where(~(share > 0),"),
    "merge-kernel-empty-part-counts": (
        MERGE_KERNELS, "tl.where(share_1 == 0.0, 0.0, out_1", "tl.where(S == 0, 0.0, out_1"),
    "merge-kernel-share-without-gradient": (MERGE_KERNELS, "share_2 * (along_2 + common)", "share_2 * common"),
    "merge-kernel-lse-without-gradient": (
        MERGE_KERNELS, "common += tl.load(dlse_ptr", "common += 0 * tl.load(dlse_ptr"),
    "kernel-y-from-keys": (R_STEP, "acc_v = tl.dot(p, v,", "acc_v = tl.dot(p, k,"),
    "kernel-tail-skipped": (R_STEP, "z, full_stop, stop,", "z, full_stop, full_stop,"),
    "kernel-rescale-forgotten": (R_STEP, "acc_k = tl.dot(p, k, acc_k * alpha[:, None]", "acc_k = tl.dot(p, k, acc_k"),
    "kernel-alpha-of-the-sum": (ONLINE, "row_sum = row_sum * alpha + tl.sum(p, 1)", "row_sum = row_sum + tl.sum(p, 1)"),
    "kernel-entropy-without-scale": (R_STEP, "cL = scale * tl.sum(", "cL = tl.sum("),
    "kernel-wrong-frame-stride": (
        R_STEP, "return block * places.positions - places.offset + i,", "return places.positions + i,"),
    "kernel-clamp-dropped": (L_STEP, "tl.maximum(cR, min_mass)", "tl.maximum(cR, 1e-30)"),
    "kernel-clamp-lets-gradient-through": (R_STEP, "tl.where(cR >= min_mass,", "tl.where(cR >= 0.0,"),
    "kernel-pooled-keys-count-once": (R_STEP, "tl.log2(tl.maximum(count, 1.0))", "0.0 * count"),
    "kernel-pooled-gradient-not-shared": (R_STEP, "tl.exp2(-tl.where(bias", "tl.exp2(0.0 * tl.where(bias"),
    "kernel-padded-queries-count": (L_STEP, "tl.where(valid, 1.0 / tl", "tl.where(valid | True, 1.0 / tl"),
    "kernel-exact-blocks-counted-twice": (L_STEP, "Z = tl.where(_is_exact(", "_ = tl.where(_is_exact("),
    "kernel-exact-weight-forgotten": (L_STEP, "row_sum = row_sum * alpha + weight", "row_sum = row_sum * alpha"),
    "kernel-exact-gradient-overwritten": (
        L_STEP, "d_logit += tl.load(dlse_exact_ptr", "d_logit += 0.0 * tl.load(dlse_exact_ptr"),
    "kernel-key-is-no-value": (R_STEP, "dk = tl.dot(p_rounded, daL, dk,", "_ = tl.dot(p_rounded, daL, dk,"),
    "kernel-gradient-without-scale": (R_STEP, "dz *= scale", "dz *= 1.0"),
    "kernel-delta-dropped": (R_STEP, "ds = dp - delta", "ds = dp"),
    "kernel-gradient-overwritten": (TILES, "valid, there + x, WIDTH", "valid, there * 0 + x, WIDTH"),
    "kernel-lse-gradient-sign": (L_STEP, "delta -= tl.load(dlse_ptr", "delta += tl.load(dlse_ptr"),
    "kernel-mass-gradient-dropped": (L_STEP, "PRECISION) + dcR[None, :]", "PRECISION)"),
    "kernel-tiles-of-equal-size": (
        PLACES, "row = tile_h * places.height // places.tiles_h", "row = tile_h * places.tile_height"),
    "kernel-inference-reads-old-z": (FUSED, "z = buffers.z[n]", "z = query"),
    "bias-scaled": (BIAS_REFERENCE, "cat([scaled_query, to_groups(", "cat([scaled_query, scale * to_groups("),
    "bias-causal-from-the-first-key": (BIAS_REFERENCE, "Sk - Sq if causal", "0 if causal"),
    "bias-mask-of-other-heads": (BIAS_REFERENCE, "repeat_interleave(H, 0)", "repeat(H, 1)"),
    "bias-kernel-scaled": (BIAS_FORWARD, "* inverse_scale\n", "* 1.0\n"),
    "bias-kernel-causal-one-short": (BIAS_FORWARD, "(j <= i + Sk - Sq)", "(j < i + Sk - Sq)"),
    "bias-kernel-causal-from-the-first-key": (BIAS_FORWARD, "(j <= i + Sk - Sq)", "(j <= i)"),
    "bias-kernel-tail-skipped": (BIAS_FORWARD, "q, fq, whole, stop,", "q, fq, whole, whole,"),
    "bias-kernel-too-many-whole-tiles": (BIAS_FORWARD, "tl.minimum(Sk, first_row + 1 + Sk - Sq)", "stop"),
    "bias-kernel-rescale-forgotten": (BIAS_FORWARD, "acc * alpha[:, None]", "acc"),
    "bias-kernel-factors-of-head-0": (BIAS_FORWARD, "b * stride_fkb + h * stride_fkh", "b * stride_fkb"),
    "bias-gradient-scaled": (BIAS_BACKWARD, "row, present, dfq, R", "row, present, dfq * scale, R"),
    "bias-key-gradient-unscaled": (BIAS_BACKWARD, "row, inside, dk * scale, D", "row, inside, dk, D"),
    "bias-lse-gradient-dropped": (BIAS_BACKWARD, "row_delta(do, out, dlse_ptr,", "row_delta(do, out, None,"),
    "bias-delta-dropped": (BIAS_BACKWARD, "ds = (p * (dp - delta[None, :]))", "ds = (p * dp)"),
    "bias-first-rows-skipped": (BIAS_BACKWARD, "start, tl.minimum(whole, Sq), j,", "whole, tl.minimum(whole, Sq), j,"),
    "bias-last-rows-skipped": (BIAS_BACKWARD, "stop, Sq, j, bh * Sq", "Sq, Sq, j, bh * Sq"),
    "bias-causal-rows-start-late": (BIAS_BACKWARD, "tl.maximum(0, first_key + Sq - Sk) //", "(first_key + BLOCK_N) //"),
    "bias-shared-factor-of-one-head": (BIAS_OP, "d.sum_to_size(f.shape)", "d[: f.shape[0], :, : f.shape[2]]"),
    "bias-parts-left-out": (BIAS_FACTORS, "for n in range(_PARTS[dtype]) for", "for n in range(1) for"),
    "bias-distance-of-the-sum": (EXACT_BIAS, "-2 * weights * x]", "2 * weights * x]"),
    "bias-alibi-from-the-first-key": (EXACT_BIAS, "positions[keys - queries :]", "positions[:queries]"),
    "bias-energy-of-sigma": (SVD_BIAS, "sigma.square().cumsum", "sigma.cumsum"),
    "bias-heads-mixed-up": (SVD_BIAS, "torch.tensor(low, device", "torch.tensor(low[::-1], device"),
    "taylor-without-half": (FEATURES, ".flatten(-2) * math.sqrt(0.5)", ".flatten(-2)"),
    "cosformer-angle-doubled": (FEATURES, "math.pi / (2 * max_tokens)", "math.pi / max_tokens"),
    "linear-state-of-the-own-chunk": (LINEAR, "k_chunk.mT).tril()", "k_chunk.mT)"),
    "linear-positions-restart": (LINEAR, "before + places[:, span]", "places[:, span]"),
    "linear-frames-transposed": (LINEAR, "mix @ kv.flatten(2)", "mix.mT @ kv.flatten(2)"),
    "linear-lse-of-nothing-is-0": (LINEAR, "weight, 1.0)), -torch.inf)", "weight, 1.0)), 0.0)"),
    "linear-kernel-half-forgotten": (LINEAR_KERNELS, "half = 0.5 * inverse", "half = inverse"),
    "linear-kernel-order-0-forgotten": (LINEAR_KERNELS, "s0 += tl.sum(of_v, 0)", "s0 += 0.0 * tl.sum(of_v, 0)"),
    "linear-kernel-sees-the-next-token": (LINEAR_KERNELS, "(j[None, :] <= i[:", "(j[None, :] <= 1 + i[:"),
    "linear-kernel-weights-of-columns": (LINEAR_KERNELS, "dw *= 1.0 + s", "dw *= 1.0"),
    "linear-kernel-gradient-of-half": (LINEAR_KERNELS, "* xa[:, :, None], 1)", "* xa[:, :, None] * 0.5, 1)"),
    "linear-kernel-scale-once": (LINEAR_KERNELS, "inside, dx * root_scale, D", "inside, dx, D"),
    "linear-chunks-count-their-own": (LINEAR_OP, "sums[:, :-1].cumsum(1)", "sums[:, 1:].cumsum(1)"),
    "linear-state-units-mixed": (LINEAR_OP, "factors[1 + dims :] = factor", "factors[1 + dims :] = 1.0"),
    "linear-step-forgets-its-token": (LINEAR_KERNELS, "z0 = tl.load(z_ptr) + 1.0", "z0 = tl.load(z_ptr)"),
    "linear-frames-read-transposed": (LINEAR_OP, "(_mixed(x, frame_weights.mT)", "(_mixed(x, frame_weights)"),
    "linear-frames-gradient-of-half": (LINEAR_OP, "of_row[1 + query.shape[3] :] = 0.5", "of_row[:1] = 1.0"),
    "linear-lse-without-gradient": (LINEAR_KERNELS, "h += weight * tl.load(dw", "h += 0.0 * tl.load(dw"),
    "linear-kernel-unit-forgotten": (LINEAR_KERNELS, "dx *= unit", "dx *= 1.0"),
    "linear-nan-hidden": (LINEAR, "some = ~(weight.abs() <= LEAST_WEIGHT)", "some = weight.abs() > LEAST_WEIGHT"),
    "window-one-short": (NEIGHBOURS, "(window - 1, 0) if causal", "(window - 2, 0) if causal"),
    "window-off-centre": (NEIGHBOURS, "((window - 1) // 2, window // 2)", "(window // 2, (window - 1) // 2)"),
    "window-rows-wrap-around": (NEIGHBOURS, ".clamp(0, size - keys)", ".clamp(0, size - keys + 1)"),
    "window-causal-along-rows": (NEIGHBOURS, "axis == causal_axis", "axis == 2 and causal_axis is not None"),
    "window-kernel-misses-the-last-brick": (WINDOW_KERNELS, "high - low + 1, 0)", "high - low, 1)"),
    "window-kernel-reaches-the-wrong-way": (
        WINDOW_KERNELS, "n.ahead_w, n.back_t, n.back_h, n.back_w", "n.ahead_w, n.ahead_t, n.ahead_h, n.ahead_w"),
    "window-kernel-sees-all-rows": (WINDOW_KERNELS, "near & (kh >= h - n.back_h) & (kh <= h + n.ahead_h)", "near"),
    "window-kernel-forgets-skipped-tokens": (WINDOW_KERNELS, "n, n.skipped, 0, n.back_t", "n, 0, 0, n.back_t"),
    "window-kernel-attends-to-nothing": (WINDOW_KERNELS, "near & there[None, :]", "near"),
    "based-projection-unscaled": (BASED, "* (head_dim / feature_dim) ** 0.25", "* 1.0"),
    "based-log-weight-forgotten": (BASED, "lse + own(self.log_weight).to(lse.dtype)[:, None]", "lse"),
    "based-decay-into-the-future-only": (BASED, "(time[:, None] - time).abs()", "(time - time[:, None]).clamp(min=0)"),
    "based-filters-mirrored": (BASED, "video, weight, padding", "video, weight.flip(2), padding"),
    "based-copies-share-parameters": (BASED, "copy.deepcopy(entry, memo)", "entry"),
    "adapter-missing-parameters-ignored": (ADAPTERS, "[name for name in expected if name not in given]", "[]"),
    "norm-mean-has-no-gradient": (NORM_KERNELS, "r * (h_even - even * share)", "r * h_even"),
    "norm-last-tokens-skipped": (NORM_KERNELS, "tl.cdiv(tokens - tl.program_id(0), ", "((tokens) // "),
    "rotary-turned-on-instead-of-back": (
        NORM_KERNELS, "grad_odd * cos - grad_even * sin", "grad_odd * cos + grad_even * sin"),
    "norm-weight-of-another-norm": (NORM_OP, "needs_x, needs_weight = ", "needs_weight, needs_x = "),
    "norm-rows-taken-for-contiguous": (NORM_OP, "x.stride(0), x.stride(1), cos", "S * C, C, cos"),
    "residual-cut-and-not-rounded": (RESIDUAL, "steps.round()", "steps"),
    "residual-scale-of-another-head": (RESIDUAL_KERNELS, "tl.load(scale_ptr + row", "tl.load(scale_ptr + token"),
    "ssim-window-along-one-axis": (
        SIMILARITY, "((2, maps.shape[2]), (3, maps.shape[3]))", "((3, maps.shape[3]),)"),
    "ssim-variances-are-second-moments": (SIMILARITY, "xx - mean_x**2 + yy - mean_y**2", "xx + yy"),
    "lpips-chunks-weigh-alike": (SIMILARITY, "* len(x)", "* 1"),
    "paper-score-with-the-captions-halves": (SUMMARY, "(ssim + ssim_1)", "0.5 * (ssim + ssim_1)"),
    "velocity-points-to-the-noise-twice": (OBJECTIVE, "velocity - (draw.noise - latents)", "velocity - draw.noise"),
    "flow-shift-the-other-way": (OBJECTIVE, "self.shift * u / (1 + (", "u / (1 + ("),
    "given-frame-counts": (OBJECTIVE, "(~(given & first)).to(x.dtype)", "torch.ones_like(first).to(x.dtype)"),
    "experts-swapped": (OBJECTIVE, 'Expert("transformer", boundary, 1.0)', 'Expert("transformer", 0.0, boundary)'),
    "ranks-see-the-same-clips": (LOADER, "first + self.rank * self.batch_size", "first"),
    "dropped-captions-stay": (LOADER, 'sample.latents, text, ""', 'sample.latents, sample.text, ""'),
    "position-of-the-loader-forgotten": (TRAINER, 'if "loader" not in missing', "if False"),
    "captions-dropped-alike-in-all-epochs": (LOADER, "self.seed, epoch, 2)", "self.seed, 0, 2)"),
    "gradient-not-clipped": (TRAINER, "config.optimizer.clip)", "1e9)"),
    "average-without-warm-up": (TRAINER, "decay=config.ema", "decay=config.ema, min_decay=config.ema"),
    "first-layers-move-first": (TRAINED, "full if number < first", "full if number >= len(layers) - first"),
    "validation-asks-one-expert": (TRAINER, "in plain.experts if e.low <= sigma", "in plain.experts if e"),
    "validation-of-the-last-weights": (TRAINER, "self.average.copy_to(self.trained.values())", "pass"),
    "validation-noise-of-the-step": (TRAINER, '"validation", clip', '"validation", self.step, clip'),
    "validation-counts-what-there-is-not": (
        TRAINER, "counts = clip < clips", "counts = number * self.data_world < clips"),
    "folder-open-to-a-second-run": (TRAINER, "held.enter_context(_hold(self.output))", "pass"),
    "compiled-gradient-of-eager-blocks": (TRAINER, '("force_eager", "default")', '("force_eager", "force_eager")'),
    "teacher-with-what-is-learnt": (TRAINED, "self._scale(expert, 0.0)", "pass"),
    "teacher-leaves-another-scale": (TRAINED, "self._scale(expert, 1.0)", "self._scale(expert, 2.0)"),
    "teacher-keeps-the-processors": (TRAINED, "for attn, processor, _ in before:", "for attn, processor, _ in ():"),
    "average-forgotten": (TRAINER, "checkpoints.load_weights(path / checkpoints.AVERAGE, shadow)", "pass"),
    "checkpoint-named-before-it-is-on-disk": (CHECKPOINTS, "in (*folder.rglob(\"*\"), folder)", "in ()"),
    "checkpoint-never-verified": (CHECKPOINTS, ' != entry["sha256"]', " is None"),
    "ranks-take-the-first-heads": (CONTEXT_PARALLEL, "x.narrow(dim, self.start,", "x.narrow(dim, 0,"),
    "residual-of-any-branch": (RESIDUALS, "unchanged and same_arguments(self.conditioning, conditioning)", "unchanged"),
    "residual-of-the-run-before": (RESIDUALS, "self.run() is step.timesteps and self.evaluation", "self.evaluation"),
    "residual-of-the-refresh-before": (RESIDUALS, "kept.step >= branch.due", "kept.step >= 0"),
    "residual-added-twice": (
        RESIDUALS,
        "return add_residual(approximate(), self._take(branch, layer), implementation=implementation)",
        "return add_residual(add_residual(approximate(), self._take(branch, layer)), self._take(branch, layer))",
    ),
    "residual-not-kept": (RESIDUALS, "return _Kept(branch.step, residual, None)", "return _Kept(-1, residual, None)"),
    "residual-fetched-when-it-is-late": (RESIDUALS, "            self._fetch(branch, following)", "            pass"),
    "residuals-of-both-transformers": (RESIDUALS, "return self.step == step.step", "return True"),
    "residual-never-freed": (RESIDUALS, "if branch is not None and branch.last:", "if False:"),
    "residuals-of-a-run-that-ended-early": (RESIDUALS, "branch.pipeline() is pipeline", "False"),
    "residuals-of-other-pipelines-freed": (RESIDUALS, "branch.pipeline() is pipeline", "True"),
    "residual-memory-of-one-device": (RESIDUALS, "other == device or other.type != device.type", "True"),
    "versions-of-inference-tensors": (RESIDUALS, "0 if tensor.is_inference() else tensor._version", "tensor._version"),
    "changes-in-lists-unseen": (
        RESIDUALS, "for tensor in tensors_in(value))", "for tensor in [value] if isinstance(value, torch.Tensor))"),
    "branch-outlives-its-call": (FORWARD_CONTEXT, 'latest.pop("branch", None)', 'latest.get("branch")'),
    "block-computed-again-without-its-call": (
        FORWARD_CONTEXT, 'if not torch.compiler.is_compiling() and "call" in latest', "if not latest"),
    "original-processor-changed": (VIDEO_PROCESSOR, "copy.copy(original)", "original"),
    "plan-heads-not-put-back": (
        PROCESSORS, "parts[head] for head in range(len(parts))", "parts[head] for head in parts"),
    "flops-of-the-last-r-step": (FLOPS, "2 * (1 + sums) * last_pairs", "2 * sums * last_pairs"),
    "diagnosis-kl-the-other-way": (DIAGNOSIS, "(lse.double() - weight.double())", "(weight.double() - lse.double())"),
    "diagnosis-own-frame-is-the-next": (DIAGNOSIS, '"own": distance[:, 0]', '"own": distance[:, 1]'),
    "planning-allows-twice-the-error": (PLANNING, "values > budget.budget", "values > 2 * budget.budget"),
    "refining-counts-errors-twice": (REFINING, ".cpu() / 2)", ".cpu())"),
    "refining-keeps-the-first": (REFINING, "min(found, key=lambda measured: measured.error).plan", "found[0].plan"),
    "refining-keeps-the-last": (REFINING, "min(found, key=lambda measured: measured.error).plan", "found[-1].plan"),
    "planning-takes-the-last-share": (
        PLANNING, "shares[chosen[:, head] == method, head].mean()", "shares[chosen[:, head] == method, head][-1]"),
    "planning-spends-what-is-not-there": (PLANNING, "ub=1.0", "ub=2.0"),
    "adapter-of-any-model": (ADAPTERS, "if saved.get(key) != here.get(key)", "if False"),
    "held-cL-of-the-wrong-sign": (CONTROLS, "_hold(cL, -math.log", "_hold(cL, math.log"),
    "all-frames-held-but-the-first": (CONTROLS, "[held[:, :, :1], term[:, :, 1:]]", "[term[:, :, :1], held[:, :, 1:]]"),
    "two-resolutions-means-of-masked-keys": (TWO_RESOLUTIONS, "tokens * counts[..., None, None]", "tokens"),
    "two-resolutions-mean-key-counts-once": (
        TWO_RESOLUTIONS, "number.to(q.dtype).log()", "number.clamp(max=1).to(q.dtype).log()"),
    "last-r-step-entropy-without-z": (LAST_R_STEP, "scale * dcL_i * z_i", "0 * dcL_i * z_i"),
    "last-values-leave-L-no-gradient": (FUSED, "daL += first[0]", "daL += 0 * first[0]"),
    "last-r-step-clamp-unseen": (LAST_R_STEP, "cR >= self.call.min_mass", "cR >= -self.call.min_mass"),
    "last-r-step-of-the-first-sample": (LAST_R_STEP, "slice(i * groups, (i + 1) * groups)", "slice(0 * i, groups)"),
    "two-resolutions-exact-tiles-twice": (TWO_RESOLUTIONS, "~is_exact[..., fewest:]", "is_exact[..., fewest:] | True"),
    "two-resolutions-deviation-of-a-sample": (SELECTION, "correction=0", "correction=1"),
    "two-resolutions-sink-at-the-end": (SELECTION, "always[:, :, :, 0] = True", "always[:, :, :, -1] = True"),
    "two-resolutions-near-the-last-query": (SELECTION, "[[first - reach <= part", "[[last - reach <= part"),
    "two-resolutions-kernel-exact-tiles-twice": (
        TILE_KERNELS, 'gain = tl.where(chosen != 0, -float("inf"), gain)', "gain = gain"),
    "two-resolutions-kernel-mask-forgotten": (TILE_KERNELS, "return there & (tl.load", "return there | (tl.load"),
    "two-resolutions-kernel-means-have-no-gradient": (TILE_KERNELS, "dk += part *", "dk += 0.0 * part *"),
    "two-resolutions-kernel-cells-of-other-tiles": (
        TILE_KERNELS, "tl.store(gain_ptr + j * c + i", "tl.store(gain_ptr + i * m + j"),
    "two-resolutions-kernel-of-equal-scores-all": (TILE_KERNELS, "0) <= left)", "0) >= 0)"),
    "two-resolutions-kernel-first-part-of-a-tile": (TILE_KERNELS, "i = part * BLOCK +", "i = 0 * part +"),
    "two-resolutions-kernel-splits-of-one-head": (TILE_KERNELS, "+ bh) * cells + cell", "+ 0 * bh) * cells + cell"),
    "two-resolutions-kernel-splits-go-on": (
        TILE_KERNELS, "tl.minimum((split + 1) * span, queries)", "(split + 1) * span"),
    "two-resolutions-kernel-zero-has-a-sign": (TILE_KERNELS, "tl.where(scores == 0, 0.0, scores)", "scores"),
    "two-resolutions-cells-weigh-alike": (TILE_OP, "log2_number.exp2()", "log2_number.exp2().sign()"),
    "two-resolutions-reach-between-the-queries": (SELECTION, "reach = -math.inf if", "reach = -1 if"),
    "tangents-dropped": (LAUNCH, "if forward_ad._current_level < 0:", "if True:"),
    "two-resolutions-empty-places-attended": (
        TWO_RESOLUTIONS, "places.present[tiles[..., :most]] & is", "places.present[tiles[..., :most]] | is"),
    "window-absent-keys-attended": (WINDOW, "masked_fill(~present, -torch.inf)", "masked_fill(~present, 0.0)"),
    "joint-text-on-the-other-side": (
        FAMILIES, '_BTCHW, ("transformer_blocks",), "attn1", _all_before', '_BTCHW, ("transformer_blocks",), "attn1"'),
    "joint-grid-transposed": (FAMILIES, "_of_latents(2, 3, 4)", "_of_latents(2, 4, 3)"),
    "joint-audio-in-place-of-video": (FAMILIES, '"video_dec_block.self', '"audio_dec_block.self'),
    "joint-audio-beside-video": (
        FAMILIES, "_unwrapped(name) in names", "_unwrapped(name).endswith(tuple(names))"),
    "joint-decoder-sees-one-video": (FAMILIES, "1 + (layer >= layers - config.num_decoder_layers)", "1"),
    "joint-sound-tells-branches-apart": (FAMILIES, '"sigma", "audio_hidden_states", ', '"sigma", '),
    "control-tells-branches-apart": (FAMILIES, '("timestep", "block_controlnet_hidden_states")', '("timestep",)'),
    "arguments-in-tuples-change-unseen": (ARGUMENTS, "yield from tensors_in(part)", "yield from ()"),
    "loop-not-looked-at": (STEPS, "(kept is None or _place(kept, timesteps) is not None)", "True"),
    "loop-of-another-pipeline": (STEPS, 'call["self"] is pipe and "t" in call', '"t" in call'),
    "arguments-in-mappings-change-unseen": (ARGUMENTS, "same_arguments(expected, given)\n    if", "True\n    if"),
    "noise-levels-tell-branches-apart": (FAMILIES, '"timestep", "timestep_indices", ', '"timestep", '),
    "joint-scale-unchecked": (SEAM, " or scale not in (None, query.shape[-1] ** -0.5)", ""),
    "joint-tokens-before-unchecked": (SEQUENCE, "others < (before or 0)", "others < 0"),
    "joint-mask-ignored": (SEAM, "return attn_mask[:, 0, 0]", "return None"),
    "joint-keys-alone-last": (SEAM, "(0, 0, 0, 0, keys_alone, 0)", "(0, 0, 0, 0, 0, keys_alone)"),
    "joint-heads-in-another-group": (SEAM, "repeat_interleave(query.shape[2] // x.shape[2], 2)", "repeat(1, 1, 2, 1)"),
    "joint-unseen-mask-ignored": (SEAM, "if last is not None:", "if last is not None and name is None:"),
    "joint-text-counts-twice": (
        SEQUENCE, "merge_partials(ours, (out, lse), impl", "merge_partials(ours, *[(out, lse)] * 2, impl"),
    "joint-padding-weighs-a-little": (SEQUENCE, "_NEVER = -3e4", "_NEVER = -3.0"),
    "joint-bias-beside-the-video": (
        SEQUENCE, "(0, 0, 0, 0, self.before, self.after)", "(0, 0, 0, 0, self.after, self.before)"),
    "joint-text-counts-once-for-every-rank": (CONTEXT_PARALLEL, "if not others_whole:", "if config is not None:"),
    "joint-mask-of-ranks-ignored": (
        CONTEXT_PARALLEL, "self.sequence.beside(key_mask))", "self.sequence.beside(key_mask) | True)"),
    "joint-every-rank-has-the-first-frame": (PARALLELISM, "args[position] - own.start", "args[position]"),
    "joint-sound-attends-to-a-part": (SPREAD, 'across=("video_to_audio_attn",)', "across=()"),
}  # fmt: skip
# Tests that see a bug soonest; the interpreter, above all, is slow.
KEYWORDS = {
    **dict.fromkeys(("joint-keys-alone-last", "joint-heads-in-another-group"), "all_blocks and cosmos3"),
    "entropy-gradient-flows": "gradient_is_stopped",
    "tiles-of-equal-size": "do_not_divide",
    "pre-is-post": "ragged_blocks",
    "kernel-clamp-dropped": "strong-clamp",
    "kernel-clamp-lets-gradient-through": "strong-clamp",
    "kernel-pooled-keys-count-once": "coarse",
    "kernel-pooled-gradient-not-shared": "coarse",
    "kernel-padded-queries-count": "tiles",
    "kernel-exact-blocks-counted-twice": "own-frame",
    "kernel-exact-weight-forgotten": "own-frame",
    "kernel-exact-gradient-overwritten": "own-frame",
    "kernel-tiles-of-equal-size": "[tiles]",
    "bias-mask-of-other-heads": "some-keys-1-1",
    "bias-causal-from-the-first-key": "all-keys-17-40",
    "bias-kernel-factors-of-head-0": "factors-of-their-own-triton",
    "bias-kernel-causal-one-short": "causal and triton",
    "bias-kernel-causal-from-the-first-key": "causal and triton",
    "bias-kernel-too-many-whole-tiles": "causal and triton",
    "bias-first-rows-skipped": "causal and triton",
    "bias-causal-rows-start-late": "causal and triton",
    "bias-parts-left-out": "float32_factors",
    "linear-kernel-sees-the-next-token": "the_kernels and taylor-causal",
    "linear-kernel-weights-of-columns": "the_kernels and taylor-causal",
    "linear-chunks-count-their-own": "the_kernels and taylor-causal",
    "linear-frames-read-transposed": "the_kernels and taylor-frames",
    "linear-frames-gradient-of-half": "the_kernels and taylor-frames",
    "linear-lse-without-gradient": "the_kernels and taylor-lse",
    "linear-state-units-mixed": "go_on_from_a_state",
    "linear-step-forgets-its-token": "go_on_from_a_state",
    "linear-kernel-unit-forgotten": "overflows and keys",
    "linear-nan-hidden": "shows_nan",
    "based-projection-unscaled": "average",
    "based-log-weight-forgotten": "log_weights",
    "based-decay-into-the-future-only": "fast_decay",
    "based-filters-mirrored": "formula",
    "based-copies-share-parameters": "copies",
    "adapter-missing-parameters-ignored": "missing",
    "norm-last-tokens-skipped": "many-tokens",
    "norm-weight-of-another-norm": "strided",
    "norm-rows-taken-for-contiguous": "strided",
    "checkpoint-named-before-it-is-on-disk": "on_disk_before",
    "checkpoint-never-verified": "flipped",
    "position-of-the-loader-forgotten": "a_resumed_run_is_the_same_run and t2v-0",
    "average-forgotten": "a_resumed_run_is_the_same_run and t2v-0",
    "captions-dropped-alike-in-all-epochs": "caption_dropout_has",
    "gradient-not-clipped": "an_update",
    "average-without-warm-up": "follows_faster",
    "first-layers-move-first": "layers_move",
    "validation-asks-one-expert": "validation_is_of",
    "validation-of-the-last-weights": "validation_is_of",
    "validation-noise-of-the-step": "validation_is_always",
    "compiled-gradient-of-eager-blocks": "compiled_wrongly",
    **dict.fromkeys(
        ("teacher-with-what-is-learnt", "teacher-keeps-the-processors", "teacher-leaves-another-scale"), "the_teacher"
    ),
    "validation-counts-what-there-is-not": "validation_is_always",
    "folder-open-to-a-second-run": "second_run",
    "planning-takes-the-last-share": "cancel",
    "ranks-take-the-first-heads": "ranks_compute and flash-bias-even",
    "plan-heads-not-put-back": "every_head",
    "last-values-leave-L-no-gradient": "last-values",
    "flops-of-the-last-r-step": "flops",
    "adapter-of-any-model": "model-depth",
    "window-kernel-reaches-the-wrong-way": "the_kernels and sequence",
    "window-kernel-sees-all-rows": "the_kernels and neighbourhood",
    "joint-grid-transposed": "stock_one",
    "control-tells-branches-apart": "last_residual and cosmos",
    "loop-of-another-pipeline": "tells_nothing",
    "joint-sound-tells-branches-apart": "last_residual and ltx2",
    "joint-text-counts-once-for-every-rank": "joint-hunyuan",
    "joint-mask-of-ranks-ignored": "joint-hunyuan",
    "residuals-of-a-run-that-ended-early": "ends_early",
    "residuals-of-other-pipelines-freed": "frees_its_own",
    "residual-memory-of-one-device": "every_device",
    "versions-of-inference-tensors": "inference_mode",
    "changes-in-lists-unseen": "in_lists",
    "branch-outlives-its-call": "after_its_call",
    "block-computed-again-without-its-call": "gradients_are and hunyuan",
    "original-processor-changed": "original_processor_alone",
    "arguments-in-mappings-change-unseen": "compared_by_value",
    "noise-levels-tell-branches-apart": "minimax_h3_tells",
    "joint-scale-unchecked": "softmax_that",
    "joint-tokens-before-unchecked": "those_before_it",
    "joint-every-rank-has-the-first-frame": "joint-hunyuan",
    "joint-sound-attends-to-a-part": "joint-ltx2",
}
# The same for all bugs of a file. Keywords match the names of folders and files, too: `kernels` is in all of them.
FILE_KEYWORDS = {
    **dict.fromkeys((BIAS_FORWARD, BIAS_BACKWARD, BIAS_OP), "triton"),
    **dict.fromkeys((LINEAR_KERNELS, LINEAR_OP), "the_kernels and taylor-"),
    WINDOW_KERNELS: "the_kernels",
    CONTROLS: "holds_the_terms",
    TILE_KERNELS: "the_kernels_compute or equal_ones",
    TILE_OP: "the_kernels_choose",
    LAUNCH: "linear_attention_refuses",
    LAST_R_STEP: "coarse-only-r or batch_and",
    **dict.fromkeys((FAMILIES, SEAM), "one_softmax or replaced or padding"),
    SEQUENCE: "one_softmax or every_kind",
    STEPS: "tell_the_step and mochi",
    ARGUMENTS: "in_a_tuple",
    RESIDUALS: "last_residual and t2v or interleave or frees or callback_changes or second or offloaded",
}
# The test files to run, those that look straight at the planted file first.
TESTS = {
    SOFTMAX: ["tests/kernels/test_flash_entropy.py", "tests/kernels/test_monarch.py"],
    **{file: ["tests/kernels/test_merge.py"] for file in (MERGE, MERGE_KERNELS)},
    **{
        file: ["tests/kernels/test_flash_bias.py"]
        for file in (BIAS_REFERENCE, BIAS_FORWARD, BIAS_BACKWARD, BIAS_OP, BIAS_FACTORS)
    },
    **{file: ["tests/kernels/test_taylor.py"] for file in (FEATURES, LINEAR, LINEAR_KERNELS, LINEAR_OP)},
    **{file: ["tests/kernels/test_window.py"] for file in (NEIGHBOURS, WINDOW, WINDOW_KERNELS)},
    **{file: ["tests/kernels/test_two_resolution.py"] for file in (TWO_RESOLUTIONS, SELECTION, TILE_KERNELS, TILE_OP)},
    LAUNCH: ["tests/kernels/test_every_op.py"],
    **{file: ["tests/kernels/test_norm_rotary.py"] for file in (NORM_KERNELS, NORM_OP)},
    **{file: ["tests/kernels/test_residual.py"] for file in (RESIDUAL, RESIDUAL_KERNELS)},
    OBJECTIVE: ["tests/finetune/test_objective.py"],
    SIMILARITY: ["tests/eval/test_similarity.py"],
    SUMMARY: ["tests/eval/test_similarity.py"],
    LOADER: ["tests/finetune/test_data_loader.py"],
    CHECKPOINTS: ["tests/finetune/test_checkpoints.py"],
    **{file: ["tests/finetune/test_trainer.py"] for file in (TRAINER, TRAINED)},
    **{file: ["tests/processors/test_plan.py"] for file in (PLAN, FLOPS, PROCESSORS)},
    DIAGNOSIS: ["tests/eval/test_calibrate.py"],
    PLANNING: ["tests/eval/test_calibrate.py"],
    REFINING: ["tests/eval/test_calibrate.py"],
    BASED: ["tests/processors/test_based.py"],
    ADAPTERS: ["tests/processors/test_adapters.py"],
    CONTROLS: ["tests/eval/test_controls.py"],
    **{file: ["tests/processors/test_context_parallel.py"] for file in (CONTEXT_PARALLEL, PARALLELISM, SPREAD)},
    RESIDUALS: ["tests/processors/test_refresh.py"],
    FORWARD_CONTEXT: ["tests/processors/test_refresh.py", "tests/processors/test_families.py"],
    VIDEO_PROCESSOR: ["tests/processors/test_dense.py"],
    STEPS: ["tests/processors/test_families.py", "tests/processors/test_dense.py"],
    **{file: ["tests/processors/test_families.py"] for file in (FAMILIES, SEAM, SEQUENCE, ARGUMENTS)},
    **{file: ["tests/vmonarch/test_bias.py"] for file in (EXACT_BIAS, SVD_BIAS)},
    **{
        file: ["tests/kernels/test_monarch_triton.py"]
        for file in (ONLINE, TILES, PLACES, R_STEP, L_STEP, FUSED, LAST_R_STEP)
    },
}
DEFAULT_TESTS = ["tests/kernels/test_monarch.py"]


@pytest.fixture(scope="module")
def run_tests(start_forks):
    """(exit code, output) of tests that see the copy of the package in a folder."""
    modules = ("pytest", "hypothesis", "triton.runtime.interpreter", "triton.experimental.gluon")
    modules += ("accelerate", "peft", "omegaconf", "pyarrow.parquet", "diffusers.pipelines.wan.pipeline_wan")
    run = start_forks(*modules, OMP_NUM_THREADS="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")

    def run_tests(package: Path, tests: list[str], keyword: str = "") -> tuple[int, str]:
        return run(
            package, "pytest", "-x", "-q", "-m", "not slow and not gpu", "-k", keyword,
            "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml",
            *(ROOT / test for test in tests),
        )  # fmt: skip

    return run_tests


def copy_package(folder: Path) -> None:
    """All of it, lest a test fail for what is missing; what is not source, and large, is linked."""
    copy = lambda source, to: (shutil.copy2 if source.endswith(".py") else os.symlink)(source, to)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "vmonarch", folder / "vmonarch", ignore=ignore, copy_function=copy)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(run_tests, name, tmp_path):
    file, text, bug = BUGS[name]
    copy_package(tmp_path)
    source = tmp_path / "vmonarch" / file
    original = source.read_text()
    assert original.count(text) >= 1, f"{file} no longer contains {text!r}"
    source.write_text(original.replace(text, bug))
    keyword = KEYWORDS.get(name, FILE_KEYWORDS.get(file, ""))
    code, output = run_tests(tmp_path, TESTS.get(file, DEFAULT_TESTS), keyword)
    # Exit code 1 is "tests failed"; a syntax or import error would be another one.
    assert code == 1, output[-2000:]
    assert "1 failed" in output and "error" not in output.splitlines()[-1]
    # Nor may the bug be no more than a name that is not there.
    assert not re.search(r"^E .*(NameError|ImportError|ModuleNotFoundError)", output, re.M), output


def test_the_untouched_copy_passes(run_tests, tmp_path):
    copy_package(tmp_path)
    # Of the kernels' and processors' tests, which are slow, some that catch bugs above.
    files = (
        R_STEP,
        BIAS_FORWARD,
        LINEAR_KERNELS,
        WINDOW_KERNELS,
        TILE_KERNELS,
        LAUNCH,
        NORM_KERNELS,
        BASED,
        ADAPTERS,
    )
    files += (LOADER, CHECKPOINTS, TRAINER, PLAN, CONTROLS, CONTEXT_PARALLEL, RESIDUALS)
    slow = {test for file in files for test in TESTS[file]} | {"tests/kernels/test_flash_entropy.py"}
    others = {test for tests in TESTS.values() for test in tests} - slow
    some = "paper or strong-clamp or own-frame or ragged-triton or 7-40-5 or average or copies or missing"
    some += " or the_kernels_are and taylor-causal and not lse or many-tokens and float32"
    some += " or strided_inputs or a_dropped_caption or flipped or every_head or flops or holds_the_terms"
    some += " or definition or the_kernels_compute or linear_attention_refuses"
    some += " or (a_resumed_run_is_the_same_run and t2v-0) or breaks_off"
    for tests, keyword in ((others, ""), (slow, f"({some}) and not its_variant")):
        code, output = run_tests(tmp_path, sorted(tests), keyword)
        assert code == 0, output[-2000:]
