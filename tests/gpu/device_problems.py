"""Attention problems on a device, and two answers there: the float64 oracle's and plain low precision's.

Both answers come from one function that writes attention and its gradients down, rows by rows so that 16K
tokens fit; test_device_problems.py holds it against paddle_flashmask.reference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from device_kernels import GRADIENTS, Kernels, placed
from helpers import Results, assert_matches_reference, largest_terms
from kernel_calls import Options

from paddle_flashmask.reference import dropout_keep_mask

# Elements of one chunk of scores, [B, Hq, rows, Sk]; about fifteen such tensors live at a time.
_CHUNK_ELEMENTS = 1 << 26

_ROWS_TO_JUDGE_BY, _FEW_ROWS = 768, 16

torch.set_float32_matmul_precision("highest")  # the plain implementation's float32 is not TF32


@dataclass(frozen=True)
class Problem:
    """One attention problem: q ``[B, Sq, Hq, D]``, k, v, dout likewise, dlse ``[B, Hq, Sq]`` or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    options: Options = field(default_factory=Options)

    def with_options(self, **changes: object) -> Problem:
        return replace(self, options=replace(self.options, **changes))


def make_problem(
    seed: int,
    *,
    dtype: str = "bfloat16",
    batch: int = 1,
    seqlen_q: int = 200,
    seqlen_k: int | None = None,
    heads_q: int = 2,
    heads_k: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    gain: float = 1.0,
    dlse: bool = True,
    layouts: Mapping[str, str] | None = None,
    options: Options | None = None,
    device: torch.device | str = "cuda",
) -> Problem:
    """Normal random data times ``gain``; what is left out equals its counterpart.

    ``layouts`` gives those of q, k, v and dout that are not contiguous, by name (device_kernels.LAYOUTS).
    """
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    heads_k = heads_q if heads_k is None else heads_k
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    shapes = {
        "q": (batch, seqlen_q, heads_q, head_dim),
        "k": (batch, seqlen_k, heads_k, head_dim),
        "v": (batch, seqlen_k, heads_k, head_dim_v),
        "dout": (batch, seqlen_q, heads_q, head_dim_v),
    }
    tensors = {
        name: placed(
            (gain * normal(*shape)).to(getattr(torch, dtype)), (layouts or {}).get(name, "contiguous")
        )
        for name, shape in shapes.items()
    }
    return Problem(
        **tensors,
        dlse=placed(normal(batch, heads_q, seqlen_q)) if dlse else None,
        options=options or Options(),
    )


def run(
    kernels: Kernels,
    problem: Problem,
    *,
    wanted: tuple[str, ...] = GRADIENTS,
    layout: str = "contiguous",
) -> dict[str, torch.Tensor]:
    """Both passes: out, lse and the wanted gradients by name."""
    x = problem
    out, lse = kernels.forward(x.q, x.k, x.v, x.options, layout=layout)
    gradients = kernels.backward(
        x.q, x.k, x.v, out, lse, x.dout, x.options, dlse=x.dlse, wanted=wanted, layout=layout
    )
    return {"out": out, "lse": lse, **gradients}


def assert_matches(actual: Mapping[str, torch.Tensor], problem: Problem, name: str) -> None:
    """``helpers.assert_matches_reference`` for each of the results.

    All errors of a row's gradients may come from one rounding, that of out, so a few rows are too few to
    tell what precision costs: the plain implementation may be lucky. Short problems are given to it several
    times, with shifted grids of values to round to, and of each value's errors the largest counts. (One of
    the grids holds 1, the weight of a row's heaviest key. Taken by the maximum so far it is rounded like any
    other, and with it, where the row sees little else, all of out.) In long
    ones a few rows may still make up a block of dq, as out has no error where a row sees one key: what the
    rounding may leave there is computed. So it is for dk of short ones, where the shifts may all be lucky:
    with one row, one number decides all of a head's dk.
    """
    results, noise = _attention(problem, torch.float64, None)
    if problem.q.shape[1] > _FEW_ROWS:
        del noise["dk"]
    reference = results._asdict()
    draws = min(max(_ROWS_TO_JUDGE_BY // max(1, problem.q.shape[1]), 1), 8)
    plains = [plain_results(problem, grid=2 ** (i / draws))._asdict() for i in range(draws)]
    norms = (float(x.float().norm(dim=-1).max()) for x in (problem.q, problem.k, problem.v, problem.dout))
    scale = problem.options.scale(problem.q.shape[3]) / (1.0 - problem.options.dropout_p)
    terms = largest_terms(*norms, scale)
    terms["dk"] *= problem.q.shape[1] ** 0.5  # rows' errors add up like the steps of a random walk
    for key, values in actual.items():
        error = torch.stack([(plain[key] - reference[key]).abs() for plain in plains]).amax(0)
        assert_matches_reference(
            values.double().cpu().numpy(),
            reference[key].cpu().numpy(),
            (reference[key] + error).cpu().numpy(),
            dtype="float32" if key == "lse" else str(problem.q.dtype).removeprefix("torch."),
            name=f"{name}: {key}",
            terms=terms.get(key, 0.0),
            noise=noise[key].cpu().numpy() if key in noise else None,
            noise_together=key == "dk",
        )


def place_for(results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what calls with results like these can all write ``into``, their workspaces too."""
    into = {name: torch.empty_like(values) for name, values in results.items()}
    into["workspace"] = torch.empty(2**28, dtype=torch.int8, device="cuda")
    return into


def run_into(kernels: Kernels, problem: Problem, into: Mapping[str, torch.Tensor]) -> None:
    """Both passes, ``into`` such a place."""
    x = problem
    kernels.forward(x.q, x.k, x.v, x.options, into=into)
    kernels.backward(x.q, x.k, x.v, into["out"], into["lse"], x.dout, x.options, dlse=x.dlse, into=into)


def assert_turns_are_identical(
    call: Callable[[Problem, Mapping[str, torch.Tensor]], None],
    problems: Sequence[Problem],
    expected: Sequence[Mapping[str, torch.Tensor]],
    rounds: int,
    but: Collection[str] = (),
) -> None:
    """Call with one problem after the other, all ``into`` one place: zeros of either sign differ.

    What differs is kept and looked at once: the host would take longer than the kernels.
    """
    into = place_for(expected[0])
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(rounds):
        for problem, results in zip(problems, expected, strict=True):
            for name in results:
                into[name].fill_(torch.nan)
            call(problem, into)
            for name in results.keys() - set(but):
                different |= (_bits(into[name]) != _bits(results[name])).any()
    assert not different


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({2: torch.int16, 4: torch.int32}[values.element_size()])


def assert_same_bits(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], name: str
) -> None:
    """Equal bit by bit up to the sign of zero, and NaN nowhere."""
    for key, values in expected.items():
        different = actual[key] != values  # true where either is NaN
        if different.any():
            where = tuple(different.nonzero()[0].tolist())
            raise AssertionError(
                f"{name}: {key} differs in {int(different.sum())} of {different.numel()} places, "
                f"first at {where}: {actual[key][where].item()!r} and {values[where].item()!r}"
            )


def reference_results(problem: Problem) -> Results:
    """The float64 oracle's answer."""
    return _attention(problem, torch.float64, None)[0]


def plain_results(problem: Problem, grid: float = 1.0) -> Results:
    """What helpers.plain_attention says: float32 products of low-precision operands, P and dS among them.

    Values are rounded as multiples of 1 / ``grid`` of what the type holds.
    """
    return _attention(problem, torch.float32, problem.q.dtype, grid)[0]


def visible_rows(options: Options, rows: torch.Tensor, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """Which of the rows see which column by the indices and causality, bool ``[Bm, Hm, rows, Sk]``."""
    rows = rows[:, None]
    visible = torch.ones((1, 1, len(rows), seqlen_k), dtype=torch.bool, device=rows.device)
    if options.causal:
        visible &= torch.arange(seqlen_k, device=rows.device) <= rows + seqlen_k - seqlen_q
    if options.indices is None:
        return visible
    bounds = options.indices[:, :, None].unbind(-1)

    def within(start: torch.Tensor, end: torch.Tensor | int) -> torch.Tensor:
        return (rows >= start) & (rows < end)

    if len(bounds) == 1:
        return visible & ~within(bounds[0], seqlen_q)
    if options.causal and len(bounds) == 2:
        return visible & ~within(*bounds)
    if len(bounds) == 2:
        return visible & ~(rows >= bounds[0]) & ~(rows < bounds[1])
    return visible & ~within(*bounds[:2]) & ~within(*bounds[2:])


def dense_mask(problem: Problem) -> torch.Tensor:
    """The problem's mask as ``Options.dense`` wants it, uint8 ``[Bm, Hm, Sq, Sk]``."""
    seqlen_q, seqlen_k = problem.q.shape[1], problem.k.shape[1]
    rows = torch.arange(seqlen_q, device=problem.q.device)
    return visible_rows(problem.options, rows, seqlen_q, seqlen_k).to(torch.uint8)


def dropout_keep(problem: Problem) -> torch.Tensor | None:
    """What survives dropout, bool ``[B, Hq, Sq, Sk]``; None without dropout."""
    options, (batch, seqlen_q, heads_q, _) = problem.options, problem.q.shape
    if options.dropout_p == 0:
        return None
    seed, offset = options.seed_offset.tolist()
    shape = (batch, heads_q, seqlen_q, problem.k.shape[1])
    keep = dropout_keep_mask(seed, offset, *shape, options.dropout_p)
    return torch.from_numpy(keep).to(problem.q.device)


def _attention(
    problem: Problem, wide: torch.dtype, storage: torch.dtype | None, grid: float = 1.0
) -> tuple[Results, dict[str, torch.Tensor]]:
    """Attention and its gradients in ``wide``, rounded to ``storage`` (None: not) where a kernel would.

    Also the standard deviation of the errors in dq and dk by what kernels round before delta; 0 with a
    ``storage``.
    """

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x if storage is None else (x * grid).to(storage).to(wide) / grid

    options, heads_q, heads_k = problem.options, problem.q.shape[2], problem.k.shape[2]
    q, k, v, dout = (x.to(wide).transpose(1, 2) for x in (problem.q, problem.k, problem.v, problem.dout))
    k, v = (x.repeat_interleave(heads_q // heads_k, dim=1) for x in (k, v))
    batch, _, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[2]
    scale, kept = options.scale(head_dim), 1.0 / (1.0 - options.dropout_p)
    keep = dropout_keep(problem)

    out, dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (dout, q, k, v))
    lse = out.new_zeros((batch, heads_q, seqlen_q))
    dq_noise, dk_variance = torch.zeros_like(dq), torch.zeros_like(dk)
    for rows in _row_chunks(batch * heads_q * seqlen_k, seqlen_q):
        visible = visible_rows(options, torch.arange(seqlen_q, device=q.device)[rows], seqlen_q, seqlen_k)
        if visible.shape[1] > 1:
            visible = visible.repeat_interleave(heads_q // visible.shape[1], dim=1)
        survives = None if keep is None else keep[:, :, rows].to(wide) * kept

        scores = (q[:, :, rows] @ k.mT * scale).masked_fill_(~visible, -torch.inf)
        row_max = scores.amax(-1, keepdim=True)
        row_max.masked_fill_(row_max == -torch.inf, 0.0)
        p = (scores - row_max).exp_()
        row_sum = p.sum(-1, keepdim=True)
        lse[:, :, rows] = (row_max + row_sum.log())[..., 0]
        empty = row_sum == 0.0
        row_sum.masked_fill_(empty, 1.0)
        dp = dout[:, :, rows] @ v.mT
        dp = dp if survives is None else dp * survives
        # Divided by the sum at the end, as kernels do: the heaviest key's weight of 1 is on the grid of 1.
        dropped = p if survives is None else p * survives
        out[:, :, rows] = rounded(rounded(dropped) @ v / row_sum)
        if storage is None:
            deviation = _delta_deviation(problem, p, row_sum, out[:, :, rows], dp, v, dout[:, :, rows])
        p /= row_sum
        if storage is None:
            dq_noise[:, :, rows] = (p @ k * scale).abs() * deviation
            dk_variance += (p * scale * deviation).square().mT @ q[:, :, rows].square()
        dropped = rounded(p if survives is None else p * survives)

        delta = (dout[:, :, rows] * out[:, :, rows]).sum(-1, keepdim=True)
        if problem.dlse is not None:
            delta -= problem.dlse[:, :, rows, None].to(wide)
        ds = rounded(p * (dp - delta.masked_fill(empty, 0.0)) * scale)
        dq[:, :, rows] = ds @ k
        dk += ds.mT @ q[:, :, rows]
        dv += dropped.mT @ dout[:, :, rows]

    dk, dv, dk_variance = (x.unflatten(1, (heads_k, -1)).sum(2) for x in (dk, dv, dk_variance))
    dq, dk, dv = map(rounded, (dq, dk, dv))
    results = Results(out.transpose(1, 2), lse, dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2))
    return results, {"dq": dq_noise.transpose(1, 2), "dk": dk_variance.sqrt().transpose(1, 2)}


def _delta_deviation(
    problem: Problem,
    weights: torch.Tensor,
    row_sum: torch.Tensor,
    out: torch.Tensor,
    dp: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
) -> torch.Tensor:
    """Standard deviation of delta = rowsum(dO * O) by the roundings before it, ``[B, Hq, rows, 1]``.

    Rounded are out and its weights exp(S - row maximum), of sum ``row_sum``: each uniformly within half a
    step of the type, which is a variance of a third of its square. But no rounding leads past a value that
    the type holds: where one key has nearly all the weight, what it alone would bring, 1 and a row of v.
    """
    roundoff = torch.finfo(problem.q.dtype).eps / 2

    def variance(x: torch.Tensor, held: torch.Tensor | float) -> torch.Tensor:
        half_step = roundoff * x.abs().log2().floor().exp2()
        by_step = half_step.square() / 3
        return by_step if problem.options.dropout_p > 0 else by_step.minimum((x - held).square())

    heaviest = v.take_along_dim(weights.argmax(-1, keepdim=True), dim=2)
    by_weights = variance(weights, 1.0) * (dp / row_sum).square()
    by_out = variance(out, heaviest) * dout.square()
    return (by_weights.sum(-1, keepdim=True) + by_out.sum(-1, keepdim=True)).sqrt()


def _row_chunks(elements_per_row: int, rows: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, elements_per_row))
    return (slice(start, start + step) for start in range(0, rows, step))
