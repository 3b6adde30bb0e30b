"""The clauses of the numerics contract, as data. Everything else about a clause is derived:
its test by its slug, its section of ``docs/contract.md`` by ``python -m conformance.page``."""

from __future__ import annotations

from dataclasses import dataclass

from pararnn.testing.kinds import CELL

DRM = "DRM"
"""What a clause is about."""


@dataclass(frozen=True)
class Clause:
    """One promise. Numbers are never reused; ``slug`` is the name that cards and tests use."""

    number: int
    slug: str
    title: str
    statement: str
    tolerance: str
    why: str
    test: str
    about: str = CELL

    @property
    def id(self) -> str:
        return f"C{self.number}"

    @property
    def anchor(self) -> str:
        return f"c{self.number}"


CLAUSES: tuple[Clause, ...] = (
    Clause(
        1,
        "equation",
        "The step is the equation",
        "The hand-written step of a cell, the step derived from its Spec, and the cited paper's "
        "equation written out scalar by scalar are the same function. What a gate near 1 leaves, "
        "\\(1 - \\sigma(x)\\), keeps its digits.",
        "float64: 1e-13 relative, also for inputs and states of size 1e-6 and inputs of size 30; from "
        "the zero state with inputs of size 30, 1e-11 of every number by itself",
        "One step makes about 10 + n rounding errors of 1.1e-16 each (n terms in a recurrent dot "
        "product), and the gates damp them; 1e-13 leaves room for n in the hundreds. The second "
        "regime, with everything near zero, catches a `tanh` that cancels, such as "
        "\\(2\\sigma(2x) - 1\\); the third, with gates open or shut, one that cancels there, such as "
        "\\(\\sqrt{1 - a^2}\\). From the zero state nothing stands beside what such a gate lets in: "
        "\\(1 - \\sigma(x)\\) by a subtraction has no digit left at \\(x = 37\\), while \\(\\sigma(-x)\\) is "
        "right to \\(|x|\\) roundings.",
        "Compares the three in float64 and at 50 digits. An own cell without a hand-written "
        "`recurrence` has no second source: reported as skipped. A cell of the library without "
        "one cannot be registered, and without the paper's equation it fails.",
    ),
    Clause(
        2,
        "jacobian-proof",
        "The factorized Jacobian is the derivative",
        "For small sizes, every entry of the Jacobian that the factorized form gives equals "
        "SymPy's derivative of the whole step, as a symbolic identity.",
        "exact (symbolic)",
        "The difference is a polynomial in the values of the transcendental functions, so expanding "
        "it decides whether it is zero. The factorization does not depend on the sizes, so small "
        "ones are enough.",
        "Proves all entries: width 2 (heads of 2, a matrix state of 2 × 3).",
    ),
    Clause(
        3,
        "jacobian",
        "Jacobian products are right in numbers",
        "The factorized products \\(Jv\\) and \\(J^\\top v\\), autograd of the hand-written step, and "
        "the dense Jacobian (differentiated at 90 digits) agree.",
        "float64: 1e-13 relative",
        "As for C1: a product is one step of the same size. The dense reference has no error in "
        "float64.",
        "Random states inside the box, random directions, weights above the default bound too.",
    ),
    Clause(
        4,
        "structure",
        "The declared structure holds",
        "`jac_structure` is the class derived from the Spec. The Jacobian is exactly zero outside "
        "the pattern of its class, and with one state slot no entry of the pattern is always zero.",
        "exact zeros",
        "A zero of the pattern comes from a missing path, not from cancellation, so it is exact.",
        "Dense Jacobians by autograd of the hand-written step, at random states.",
    ),
    Clause(
        5,
        "residual",
        "A solve returns a trajectory",
        "An unpinned solve converges or falls back: every returned state is the step of the one "
        "before, up to the reported residual, for any weights. `final_state` is the last state.",
        "reported residual ≤ 1e-12 (float64), 1e-6 (float32), relative to the trajectory: the largest "
        "state up to there (the residual: of its lane, which counts 1 at most where the state is "
        "smaller); the recomputed one at most ‖J‖ times that plus 16 roundoffs",
        "Inside a chunk the states are steps. At a boundary the chunk starts from a state that "
        "differs from the end before it by the reported mismatch, and one step multiplies that by "
        "at most \\(\\lVert J \\rVert_\\infty\\). 16 roundoffs cover one step (C1) in two different "
        "orders of evaluation.",
        "All methods, chunk lengths and corrections; recurrent weights 1 and 12 times the usual "
        "size, the latter chaotic.",
    ),
    Clause(
        6,
        "agreement",
        "Parallel equals sequential",
        "Every method, chunk length and correction gives the states of a plain loop over the "
        "hand-written step in the same dtype, from zero and from any `h0`.",
        "max(1e-10, 16 u κ) in float64, max(1e-5, 16 u κ) in float32, relative",
        "Both trajectories satisfy the recurrence up to an error of at most 16 u in every step (u = "
        "1.1e-16, 6.0e-8). Errors add up to at most \\(\\kappa = \\lVert (DF)^{-1} \\rVert_\\infty\\) "
        "times that, where \\(DF\\) is the block-bidiagonal matrix with blocks \\(I\\) and "
        "\\(-J_t\\). The suite computes κ from dense Jacobians of the true trajectory. In float32 "
        "the κ part counts from κ = 10 on, in float64 practically never. The boundary tolerance "
        "(C5) is 1e-6 in float32 and enters at boundaries only.",
        "Lengths 37 and 263 (the cost model cuts the latter into chunks), weights 1 and 2.5 times "
        "the usual size; κ is in the report.",
    ),
    Clause(
        7,
        "linear-solve",
        "The linear systems are solved",
        "The adjoint that gives the gradients equals a dense solution of the block-bidiagonal "
        "system \\((DF)^\\top \\mu = g\\). One pinned Newton iteration with exact Jacobians equals the "
        "dense solution of \\(DF(H^0)\\,\\Delta = -F(H^0)\\) from the guess "
        "\\(h^0_t = f(0, x_t)\\), cut to the invariant box.",
        "float64: 1e-10 relative",
        "Dense LU is backward stable and the matrix has condition number about κ² ≤ 1e4 here, so "
        "both sides have ten digits and more.",
        "Forms every matrix with LAPACK, for every method and chunk length.",
    ),
    Clause(
        8,
        "gradients",
        "Gradients are the true ones",
        "Gradients of any function of the states and of the final state, with respect to inputs, "
        "`h0` and every parameter, equal those of autograd through the plain loop.",
        "max(1e-10, 16 u κ²) in float64, max(1e-5, 16 u κ²) in float32, relative per tensor",
        "The adjoint solves a system with the same κ, and its blocks are evaluated at states that "
        "may differ by 16 u κ (C6); with second derivatives of size about 1 this gives κ².",
        "All methods and corrections, lengths 17 and 139; also `torch.autograd.gradcheck` against "
        "finite differences.",
    ),
    Clause(
        9,
        "double-backward",
        "Second derivatives are right",
        "Products with the Hessian equal those of autograd through the plain loop. A third "
        "derivative is right or an error, never silently wrong.",
        "float64: 1e-10 relative per tensor (third: 1e-9)",
        "As for C8; in float64 the factor κ² stays far below.",
        "A nonlinear loss of states and final state, random directions; also `gradgradcheck`.",
    ),
    Clause(
        10,
        "convergence",
        "The iteration ends, and fast",
        "An unpinned solve needs at most as many corrections as there are chunks, with every kind "
        "of correction. Newton over single steps with exact Jacobians converges quadratically. A "
        "recurrence that is linear in the state is solved by one correction.",
        "iterations ≤ chunks; error \\(e_{k+1} \\le \\tfrac12 \\kappa_k M e_k^2\\) down to 1e-13",
        "Every correction makes at least one more chunk exact. The quadratic bound is the standard "
        "one for Newton's method: \\(\\kappa_k\\) is \\(\\lVert (DF)^{-1} \\rVert_\\infty\\) at the "
        "iterate, \\(M\\) the bound of the second derivative (C13).",
        "Chunks of 1, 3 and 8 steps with every correction; pinned iterations 0 to 6 against the "
        "true trajectory.",
    ),
    Clause(
        11,
        "pinned",
        "A pinned solve does what it says and reports it",
        "`max_iters=K` makes exactly K corrections, whatever the residual. `converged` says whether "
        "the residual is within the tolerance, and the residual is that of the returned states.",
        "exact count; recomputed residual at most ‖J‖ times (reported + 16 roundoffs)",
        "As for C5.",
        "K = 0, 1, 2, 3 and 6, Newton and shooting, tame and expanding weights.",
    ),
    Clause(
        12,
        "divergence",
        "Never silently wrong",
        "If the iteration does not reach its tolerance, an unpinned solve runs the rest "
        "sequentially and says so; with `on_divergence='raise'` it raises `NewtonDivergenceError` "
        "with the residual history, with `'warn'` it warns, with `'ignore'` it reports "
        "`converged=False`.",
        "the fallback's states as in C6",
        "",
        "Forces the case: corrections of kind 'none', one iteration allowed, chunks of two steps.",
    ),
    Clause(
        13,
        "bounds",
        "The invariant box and the derivative bounds hold",
        "From a state inside the declared box, any input leads to a state inside it. "
        "`derivative_bounds` is an upper bound of the first and second derivative of every output "
        "on the box.",
        "ratio to the bound ≤ 1 (+1e-12 for rounding); box left by at most 1e-15",
        "The bounds come from interval arithmetic, so they hold for every input.",
        "Samples the box with its corners (eight units of it where it is infinite) and inputs of "
        "many sizes; maximizes the second derivative over sign vectors.",
    ),
    Clause(
        14,
        "certificate",
        "A certified error is an upper bound",
        "With `certify=True`, whenever `error_bound` is finite the largest error of any state is at "
        "most that, whatever the size of drives, starts and parameters, and whether or not states "
        "stay in their declared bounds. Otherwise it is infinite. A converged solve of a tame "
        "cell is certified.",
        "measured error ≤ error_bound, without slack; bound ≤ 1e-3 for a converged tame solve",
        "The error obeys \\(|d_t - c_t| \\le |A_t| |d_{t-1} - c_{t-1}| + \\ell_t + R_t \\lVert "
        "d_{t-1} \\rVert + \\tfrac12 M \\lVert d_{t-1} \\rVert^2\\): \\(c\\) is the next "
        "correction, \\(\\ell_t\\) what it misses by and the rounding of the step, \\(R_t\\) that "
        "of the Jacobian. Both come from running the printed programs on balls, so they are of the "
        "size of what was evaluated. Any β with \\(Y + qβ + \\tfrac12 κMβ^2 \\le β\\) is a bound, by "
        "induction.",
        "True trajectory at 50 digits; pinned at 0 to 4 iterations and unpinned; float64 and "
        "float32; weights 1, 3 and 8 times the usual size. Own Specs whose products of 1e4 and 1e12 "
        "cancel.",
    ),
    Clause(
        15,
        "causality",
        "The past does not depend on the future",
        "Changing inputs from step t on leaves all states before t bit for bit as they were (same "
        "shape and options), however large the new ones are: what comes later has no say in how a "
        "step is computed. Gradients of earlier states with respect to later inputs are zero.",
        "exact (bitwise)",
        "An iteration that stops for all chunks at once would break this: later inputs would decide "
        "how often the early states are polished. Chunks that have met the tolerance are frozen. A "
        "scan whose chunk products leave the range of the dtype walks the next chunk again, in the "
        "lane concerned.",
        "Cuts at 1, 10 and the last step, with later inputs five times and 1e30 times as large.",
    ),
    Clause(
        16,
        "batch-independence",
        "A row does not depend on other rows",
        "Changing all other rows of the batch leaves a row bit for bit as it was (same shape and "
        "options), however large the new ones are.",
        "exact (bitwise)",
        "As for C15, across rows.",
        "The other rows get new states and inputs five times and 1e30 times as large.",
    ),
    Clause(
        17,
        "streaming",
        "Pieces give the whole",
        "Solving a sequence in pieces, each from the `final_state` of the one before, gives what one "
        "solve gives. `ParaRNN.step` in a loop gives what `forward` gives, in evaluation also with "
        "dropout between layers.",
        "as C6",
        "As for C6: two trajectories of the same recurrence.",
        "Pieces of odd lengths, one of a single step.",
    ),
    Clause(
        18,
        "resets",
        "A reset starts afresh",
        "Where `resets[b, t]` is true, step t of row b starts from the zero state, also in a "
        "cell whose sequences start elsewhere (a constant or a learned start): the result is that of "
        "separate sequences, those after a reset with `h0` = 0, and no gradient crosses (exactly "
        "zero). A reset selects and multiplies nothing by zero: a NaN, an infinity or a state that "
        "overflowed before it changes no bit after it, and what comes before has gradients of "
        "exactly zero there, too; so in `delta_scan`, on the CPU and in its kernels, where chunks hold "
        "steps before and after a reset. (In the plain loop, `method='sequential'`, gradients are "
        "autograd's.) `ParaRNN`, mixers called as layers, blocks and stacks take `resets`, too.",
        "as C6; gradients across: exactly 0; after bad numbers: exact (bitwise)",
        "As for C6.",
        "Random masks, resets at step 0 (which ignore `h0`) and beside chunk boundaries; a NaN and an "
        "infinity five steps before a reset; a `ParaRNN` of the cell, and a mixer as a layer. Blocks and "
        "stacks: `tests/layers/test_dialect.py`.",
    ),
    Clause(
        19,
        "variable-length",
        "Padding does nothing",
        "A row that is padded at its end gives, up to its length, what it gives alone, whatever the "
        "padding; a loss on valid steps has a gradient of exactly zero in the padding. A layer that is "
        "told the `lengths`, or given a `PackedSequence`, does not look at padding: it may hold NaN, "
        "and outputs and gradients are zero there. Without lengths a NaN in the padding is one in the "
        "input (C27): it reaches no earlier state, but gradients, as in the loop. `h_n` has every "
        "row's final state as the solver carries it, not rounded.",
        "as C6; gradients of padding, and what the padding holds: exact (bitwise)",
        "Follows from C15 and C16, but at other shapes, so with the tolerance of C6.",
        "Lengths 1, 5, 13 and 24 in one batch, padding a hundred times as large as the inputs; with "
        "lengths also NaN and infinities; `h_n` in bfloat16 beside a float32 cell on the same drives.",
    ),
    Clause(
        20,
        "backends",
        "Devices agree",
        "States and gradients on the device under test equal those on the CPU.",
        "states as C6, gradients as C8",
        "As for C6 and C8: two trajectories of the same recurrence.",
        "`--device cuda`; on a machine without a second device it is reported as skipped.",
    ),
    Clause(
        21,
        "determinism",
        "Twice the same",
        "The same call gives the same bits twice, states and gradients, in every dtype.",
        "exact (bitwise)",
        "",
        "All methods, all dtypes.",
    ),
    Clause(
        22,
        "invariances",
        "Order and layout do not matter",
        "Permuting the batch permutes the result. Inputs and `h0` of any strides give the result of "
        "contiguous ones.",
        "as C6",
        "Matrix products may round differently in other layouts; then C6 applies.",
        "Time-first, channels-first, strided, sliced and expanded inputs.",
    ),
    Clause(
        23,
        "shapes",
        "Every length and batch size works",
        "T = 0, 1, 2, odd, even and prime lengths, and B = 0, give states and a final state of the "
        "right shape, dtype and value, and finite gradients. With T = 0 the final state is `h0`.",
        "as C6",
        "",
        "T in 0, 1, 2, 3, 7, 16, 31; B in 0, 1, 2.",
    ),
    Clause(
        24,
        "half-precision",
        "Narrow dtypes round the output only",
        "A bfloat16 or float16 cell computes in float32 from the same drives: its states are those "
        "of the float32 run rounded once, its final state is in float32, and so for gradients of "
        "drives and recurrent parameters. Fused kernels keep the output slot for the backward pass "
        "as it is given out, rounded: their gradients are those at the kept states, rounded once.",
        "1 ulp of the narrow dtype; gradients 1 ulp after 1e-5 of the largest entry",
        "Rounding gives half an ulp; the float32 runs may differ by C6, which can move a value over "
        "a rounding edge, so 1.",
        "A float32 twin with the same weights, given the same drives; for kept states, autograd of "
        "every step at them in float64.",
    ),
    Clause(
        25,
        "constraint",
        "Bounded weights are bounded as stated",
        "Recurrent weights are used clipped to `max_recurrent_norm` (entries of a diagonal map) or "
        "rescaled to that spectral norm (head matrices). The default is 0.5 for diagonal maps and "
        "none for heads. The gradient of a clipped entry passes straight through, also outside the "
        "bound, so that no entry gets stuck there. A bound that is neither None nor a positive number "
        "(True, a string, NaN) is an error.",
        "exact for clipping; 1e-14 for the spectral norm",
        "Clipping has no rounding. The norm comes from an SVD, accurate to a few roundoffs.",
        "Weights six times the usual size, bound 0.7.",
    ),
    Clause(
        26,
        "errors",
        "Misuse is an error that helps",
        "Wrong shapes, widths, dtypes, devices and settings raise `ValueError` or `TypeError` with "
        "what was got and what is expected. Nothing is broadcast or converted silently.",
        "exact",
        "",
        "About thirty wrong calls.",
    ),
    Clause(
        27,
        "nan-containment",
        "A NaN stays where it is",
        "A NaN or infinity in one row leaves the other rows and the earlier steps of its own row "
        "bit for bit as they were, with finite gradients; the states that are not finite are those "
        "that the plain loop has.",
        "exact (bitwise)",
        "As for C15 and C16.",
        "One poisoned input in the middle of one row.",
    ),
    Clause(
        28,
        "time-gap",
        "No time, a little time, much time",
        "The step of a cell with time gaps is continuous at \\(\\Delta t = 0\\), with the value there "
        "that its card states, and it keeps the digits of the change that a short gap makes. "
        "Derivatives with respect to gaps are right, at 0 too. Sequences whose gaps range from 0 "
        "to 1e4 give what the plain loop gives, with finite gradients. An infinite gap counts as 1e10; "
        "one that is NaN or negative is an error on the CPU (C33 has a rule for calls of mixers).",
        "value at 0: 1e-15; change over a gap of 1e-6, from the zero state: 1e-12 relative "
        "(float64), 1e-5 (float32); derivative at 0: 1e-13 relative; sequences as C6",
        "The change is a product of a few factors, each right to a few roundoffs; a cell that "
        "computes \\(1 - e^{-x}\\) by a subtraction loses ten digits of it.",
        "One step at gaps 0, 1e-12, 1e-6 and 1e4 against 50 digits; sequences with gaps 0, 1e-6, 1 "
        "and 1e4 in random order, and with infinite ones. A cell without time gaps: reported as "
        "skipped.",
    ),
    Clause(
        29,
        "linearity",
        "What is linear is solved at once",
        "The step of a cell of class `linear` is affine in its state: the step of a mixture is the "
        "mixture of the steps. So one correction is exact, from any guess and for any chunk length. "
        "Products of transitions have no say in the range: see [C46](#c46).",
        "1e-12 relative for one step; sequences as C6",
        "A mixture of steps is a few steps, as C1. One Newton correction of a linear recurrence is "
        "its solution; what is left is rounding.",
        "Mixtures of two states with shares of 0.3 and −2.5; one pinned correction of single steps, "
        "and of chunks of 5. Other cells: reported as skipped.",
    ),
    Clause(
        30,
        "orthogonality",
        "Rotations keep distances",
        "The transition of a cell that is said to be orthogonal has orthonormal columns and the "
        "determinant 1, for every input: two states stay as far apart as they were.",
        "1e-14 for \\(A^\\top A\\), 1e-13 for the determinant, 1e-12 relative after 257 steps",
        "A rotation of a plane makes two roundings a number, and a step makes a few of them; over a "
        "sequence they add up.",
        "Transitions of single steps, column by column; two starts of one sequence. Other cells: "
        "reported as skipped.",
    ),
    Clause(
        31,
        "positivity",
        "Positive states stay positive",
        "States of a cell that bounds them below by 0 are never negative, in any dtype and for "
        "inputs of any size, and above 0 for ordinary ones. The derivative of a learned start at its "
        "first value is 1. A given start with a negative entry or a NaN is an error (on a GPU, an "
        "assertion of the device), in every way to run a sequence. So is a negative entry in a state "
        "that is given to a single step, on the CPU; a NaN there may come from a step before.",
        "exact",
        "Sums and products of numbers that are not negative round to numbers that are not negative.",
        "Sequences from the default start and from zero, every way to solve, inputs of size 1 and "
        "30. Other cells: reported as skipped.",
    ),
    Clause(
        32,
        "snap",
        "Angles lie on their grid",
        "A snapped angle is the nearest multiple of \\(2\\pi/m\\), less whole turns: \\(m\\) turns are "
        "none, and large angles lose no digits. The "
        "derivative of a step by the angle is that of the recurrence without the grid, taken at the "
        "angle on it.",
        "1e-13 after at most 6 turns; angles of size 1e3 to 1e9 in float32: 4 roundoffs; derivative "
        "1e-12 relative",
        "An angle is a rounded multiple of a rounded number; cosine and sine of it are right to a "
        "rounding or two.",
        "Angles from −12 to 12, every order of the cell's grid. Cells without a grid: reported as "
        "skipped.",
    ),
    Clause(
        33,
        "decay",
        "Time fades the old state, and nothing else",
        "With a decay, what a step keeps of the old state is \\(\\gamma = e^{-\\lambda f(\\Delta "
        "t)}\\) times what it keeps at \\(\\Delta t = 0\\), and what the input adds is the same. "
        "In the call on a sequence, gaps that are NaN or negative count as 0 and infinite ones as "
        "1e10, with one warning an instance on the CPU and finite gradients. Gaps without a decay, "
        "and a decay without gaps, are a `ValueError`.",
        "1e-12 relative; what the input adds and what bad gaps count as: exact (bitwise)",
        "One more factor in one product.",
        "Both kinds of decay, both functions of the gap, gaps from 0 to 1e300, for the forms "
        "with a decay of the cell's class. Cells whose class has none: reported as skipped.",
    ),
    Clause(
        34,
        "readout",
        "What a layer passes on is read from its states",
        "Where a Spec reads something from the new state, the output of a layer is that read-out of "
        "the states of a plain loop, through the cell's output projection, in every way to run it; "
        "also where the states in between are not computed. The same holds for gradients, after "
        "resets, and for what a NaN reaches.",
        "1e-13 for one read-out; outputs and the final state as C6, gradients as C8; what a NaN does "
        "not reach: exact (bitwise)",
        "The same numbers in another order, as C6 and C8.",
        "The read-out against 50 digits of the Spec; the layer by every method, and step by step. "
        "Other cells: reported as skipped.",
    ),
    Clause(
        35,
        "drm-model",
        "The DRM is what the notes say",
        "The logits of every variant, with the semantics of the notes and with those of the "
        "published system, are those of the notes' equations written out token by token, with dense "
        "matrices and without a scan; also on the recurrent path. Every variant has as many "
        "parameters as published.",
        "1e-12 relative (float64); parameter counts: exact",
        "The same numbers in another order; a state is bounded after every step, so errors do not "
        "grow over the few tokens.",
        "All variants at tiny sizes, two blocks and a part of one, a short radius and large steps.",
        DRM,
    ),
    Clause(
        36,
        "drm-metric",
        "The metric is positive definite, and solved",
        "\\(G = \\mathrm{diag}(D) + UU^\\top\\) has no eigenvalue below \\(\\epsilon\\), so its rank "
        "is the width of the state. The condition bound is above its condition number. Energy and "
        "coupling are those of the dense matrix. Naturalization by the Woodbury identity is the dense "
        "solution, for any size of U, and so are its derivatives. A metric that is not finite spoils "
        "its own state only.",
        "1e-13 for metric, energy and coupling; solutions \\(u + 16\\,u'\\kappa\\) relative, where "
        "\\(u\\) is the roundoff of the dtype, \\(u'\\) that of the solution's dtype (float64 for "
        "`'safe'`), and \\(\\kappa\\) the condition number of \\(G + \\lambda I\\); "
        "derivatives 1e-12; other states: exact (bitwise)",
        "Where v is near the span of a large U, the identity subtracts nearly equal terms, and loses "
        "as many digits as a dense solution does.",
        "U of size 0 to 1e6, with and without damping, a velocity along U among others, against 50 "
        "digits.",
        DRM,
    ),
    Clause(
        37,
        "drm-span",
        "Raw velocities lie in the span of the directions",
        "Without naturalization a velocity is a combination of the directions, whose gates are in "
        "[0, 1]; so it is if naturalization is solved in the span. Naturalization by the whole metric "
        "leaves the span. With a basis of q vectors, raw states stay in a space of q dimensions.",
        "1e-13 of the velocity's length; in-span naturalization 1e-11",
        "A combination of a few vectors; in the span, one solution with a Gram matrix more.",
        "The part of a velocity that is orthogonal to all directions, by a QR decomposition.",
        DRM,
    ),
    Clause(
        38,
        "drm-ablation",
        "A metric that nothing uses changes nothing",
        "J_NO_NATURALIZATION and J_NO_METRIC give the same logits, and after the same training the "
        "same parameters; the unused metric is left as it was. So the parts draw their first "
        "parameters independently of each other. In every variant a parameter is frozen if and only "
        "if no logits of its configuration depend on it; what a call does not use (the first state where "
        "one is given, the metric in step 0 of a warm-up) has a gradient of zeros. So processes that train "
        "together wait for no gradient that never comes.",
        "exact (bitwise)",
        "",
        "Four steps of AdamW with weight decay; notes and published semantics, blocks and the "
        "recurrent path; float64, float32 and bfloat16 autocast. Gradients of every variant on every "
        "path that it has, in the step that begins the warm-up, from a given state, and in the step after.",
        DRM,
    ),
    Clause(
        39,
        "drm-paths",
        "Blocks of one token are the recurrence",
        "With blocks of one token the block path is the recurrent one. The end of a longer block does "
        "not depend on the order of its tokens, that of the recurrence does. The parallel path gives "
        "the states and gradients of the recurrent one. A bounded state stays within the radius, and a "
        "state of any finite length is bounded by its direction.",
        "blocks of one token: exact (bitwise); order: 1e-13; parallel path: 1e-10, gradients 1e-9",
        "The order of a sum changes its last digits. The parallel path ends at an estimated error "
        "near rounding, in steps of this size.",
        "All variants with base dynamics, large steps, windows of all tokens and of five.",
        DRM,
    ),
    Clause(
        40,
        "drm-causality",
        "No path and no option looks ahead",
        "Changing tokens from step t on leaves logits, states and base states before t bit for bit "
        "as they were, and changes the logits at t.",
        "exact (bitwise)",
        "As for C15.",
        "All variants, notes and published; the three paths and some twenty options; cuts inside of "
        "blocks and between them.",
        DRM,
    ),
    Clause(
        41,
        "drm-streaming",
        "Reading token by token gives the whole",
        "A text that is read in pieces, a prompt and then token by token, gives the logits of the "
        "whole, in every variant.",
        "1e-12 relative",
        "The same numbers at other shapes.",
        "A prompt that ends inside of a block, three tokens that reach into the next, and a rest.",
        DRM,
    ),
    Clause(
        42,
        "drm-memory",
        "The memory is its loop, without a division",
        "The scan of the selective memory equals its loop, and pieces that are carried on equal the "
        "whole: composing affine maps is associative. Nothing is divided by a product of gates, so "
        "gates whose product underflows, and gates of exactly 0, are right. "
        "\\(|m_t| \\le |m_0| + 1/(1 - \\max f)\\).",
        "1e-13 relative (float64), 1e-6 (float32)",
        "Every map is a contraction, so errors fade.",
        "517 steps with gates near 0, near 1 and between; 400 steps with gates of 1e-4.",
        DRM,
    ),
    Clause(
        43,
        "drm-terms",
        "A term of weight zero is not there",
        "A loss term with weight 0 is not evaluated: a NaN in it reaches neither the loss nor a "
        "gradient, and a metric that only it would use has no gradient at all, so that weight "
        "decay leaves it alone. The total is the weighted sum of the other terms.",
        "exact (bitwise); total 1e-13",
        "",
        "A recorded geometry of NaN beside the cross entropy.",
        DRM,
    ),
    Clause(
        44,
        "scale",
        "Small trajectories are solved as well as ordinary ones",
        "C6 holds relative to the trajectory, for states of any size down to the smallest normal "
        "number: for rows and lanes that are smaller than others by any factor. A mismatch counts "
        "relative to the state, or to the largest one that its lane (head, or row of a matrix state) "
        "has had since a reset, which counts 1 at most: it looks back only, so that C15 and C16 hold.",
        "as C6, relative to the largest state of the lane (where lanes mix: of the row up to there)",
        "Errors of 16 u of every state before add up to at most κ times that of the largest. A "
        "state that crosses zero is compared to what its rounding errors come from, and what is "
        "small after large states has to be right too.",
        "Inputs × 1e-3 and 1e-7 (float32), and 1e-6, 1e-13 (float64) without a bias, one row a thousand "
        "times smaller; newton, chunks that are guessed by one step, Picard.",
    ),
    Clause(
        45,
        "finite",
        "Not finite is not a success",
        "Where a state is NaN or infinite, `converged` is false and the residual infinite, on every "
        "path, and `verify_agreement` does not pass: its verdict is `NOT FINITE` where both runs have "
        "the same states, and `FAIL` where they differ. No other state changes for it (C27). A layer "
        "that forms no states is judged by what it computes, its output and its final state.",
        "exact",
        "",
        "A NaN in one input, all methods; without it, all pass.",
    ),
    Clause(
        46,
        "scan-range",
        "A scan has the range of its states",
        "The states of a scan (`linear_scan`, `matrix_scan`, `matrix_affine_scan`, "
        "`parallel_scan_log`, and the scans that solve linear cells) are those of the loop in the same "
        "dtype wherever these are finite, though products of coefficients overflow, or underflow and "
        "lose their digits, and not finite where these are not. So are the cotangents of its backward "
        "pass, beside the loop's; and the outputs and the final state "
        "of an eager `delta_scan` on the CPU, up to roundoffs of the terms of its states. An eager scan on "
        "another device makes no check and promises none of this. Nor do the kernels of `delta_scan`, "
        "whose products inside a chunk may leave the range where no state does: these reach up to the "
        "next reset (C18) and, in a call with resets, no earlier output; in a call without, what "
        "overflows may make earlier outputs of its chunk NaN.",
        "\\(8\\,n\\,k\\,u\\,\\sigma_t\\) at the end of a chunk of \\(n\\) steps, with "
        "\\(\\sigma_t = |A_t| \\sigma_{t-1} + |b_t| + \\epsilon\\), blocks of \\(k\\) rows and "
        "the least normal number \\(\\epsilon\\); within a chunk the loop itself",
        "A start that products have found and the end of the chunk before are sums of the same terms, "
        "so they differ by roundoffs of the sum of their absolute values. Where they differ by more "
        "the chunk is walked again from that end. Without kernels this check needs to look at the "
        "numbers, so it is made on the CPU; the fused kernels make it on the device, forwards and "
        "backwards, with the sizes of what the start was summed from for \\(\\sigma_t\\).",
        "States that walk over 42 orders of magnitude in float32 and 320 in float64, scalars and "
        "blocks of two, in both directions; and prefixes and rows of them beside other numbers; on the "
        "CPU a delta rule whose decays walk so, and one that overflows before a reset. Once "
        "for every cell of class `linear`, with its own draws. Other cells: reported as skipped.",
    ),
    Clause(
        47,
        "memory",
        "Nothing is left behind",
        "When the results of a solve are dropped, its autograd graph is gone at once, before any "
        "garbage collector runs, with or without a backward pass: no node of the graph reaches its "
        "own output. Live tensors, and memory on a GPU, are constant from step to step. The reports "
        "of a layer hold no graph and nothing that leads to one; they can be pickled, states "
        "included.",
        "exact (no object more)",
        "A node is there or not.",
        "A marked node before the solve must die with it, the collector being off, and tensors are "
        "counted; all methods, chunk lengths that divide T and that do not.",
    ),
    Clause(
        48,
        "modules",
        "A cell is a module, and is called",
        "A layer calls its cell once a sequence and once a step, so that hooks of the cell act then, "
        "and what they return counts; shards of a cell are gathered then. Nothing reads past the "
        "input projection, whatever takes its place or wraps it (an adapter, a hook, pruned, "
        "normalised or quantized weights). Recurrent weights that a parametrization or a hook of "
        "`torch.nn.utils` computes are those of the parameters as they are now, in every way to run a "
        "cell. Layers after the first are rebuilt as the first is, or it is an error that says what "
        "they would lack.",
        "1e-13 relative for the layer, the loop and the step; hooks and pruned weights: exact "
        "(bitwise); gradients of pruned weights: 1e-13",
        "The same drives, so the same numbers in another order.",
        "Hooks on the cell and on its projection; a pruned recurrent weight that changes between "
        "calls. Wrappers, shards and rebuilt layers: `tests/cells/test_wrappers.py`.",
    ),
    Clause(
        49,
        "task-answers",
        "Probe tasks have answers, and nobody judges by what was chosen",
        "Who reads a sequence of a probe task knows every answer that is asked: an oracle that shares "
        "no code with the task scores 1. The noisy pendulum is known as well as its noise allows. "
        "Weights are chosen by other batches than those that judge them, and neither are batches of the "
        "training stream.",
        "exact; pendulum: its answers are one swing to 1e-6, and least squares on its inputs has a mean "
        "squared error of at most 2 noise² / T",
        "Two numbers, angle and speed at the start, are estimated from 2T noisy ones, so the error that "
        "is left is noise² / T on average; float32 answers round at 6e-8.",
        "All tasks and the text of the recall probe, at the lengths at which they are trained and "
        "judged.",
        DRM,
    ),
)

BY_SLUG = {clause.slug: clause for clause in CLAUSES}
