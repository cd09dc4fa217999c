"""Model check of the alignment: an explicit-state search over every small world, through the real `core` functions.

    python -m pytest tests/formal        the check, and 21 seeded faults that it must find
    python -m tests.formal [FAMILY ...]  a table: states, transitions, CPU seconds of each configuration

A state is the whole world at the beginning of a round (`space.py`): each rank's window and unread indices, the shared
cursor, the held-back step. From each state real `RankProtocol` objects are restored (`ranks.py`) and run one round,
with element-wise minima and sums and `exclusive_sums` between them (`search.py`). The search follows every choice: how
many samples each rank has at the start; which kind (length, media) each next sample is, or that it is dropped, chosen
when it is read; every draw of held-back groups; and where the table says so, every order of the steps, and where a new
sample's index lies among those of its kind in the window (else behind them). `checks.py` asserts G1-G7 of design.md in
each transition, and that the rest to do shrinks, so that no state can recur and every way ends in a closed epoch. What
breaks is printed as the shortest way there (`trace.py`). `spaces.py` lists the configurations; `mutants.py` breaks the
code to show that it is noticed.

Covered: 192 configurations, 624 thousand states, 734 thousand transitions. Both rules, both splits where they differ,
`max_wait` 1 and 2, `steps_multiple` 1 and 2; lengths of three classes: three fit, two fit, none does (where it says so
two of them). D is the depth; static: most samples *per rank*, and every uneven combination; shared: *in all*.

    2 ranks, static   6: D 1-4, and D 4 with the ramp, samples with indices in any order
                      5: drops, D 1-3; 4: drops, D 4; 4: capacity 1 and 2, D 2-4
                      6, 6, 4, 3: quotas 0.5 and 1.0, fresh and resumed runs, every order of steps, D 1, 2, 3, 4
                      4: media, dummy image, pad multiples 1 and 2, four classes, D 2-4
                      4: windows that are short for want of bytes, D 3
    2 ranks, shared   10: D 1-3, and 4 with the ramp; capacity none and 1, samples with indices in any order
                      9: drops, every order of steps, D 1, 2 (two classes: D 3, and 4 with the ramp); short windows, D 3
                      9: drops and quotas 0.5 and 1.0, every order of steps, D 1-3, two classes
    3 ranks           4: static, D 1-3; 6: static, D 4, two classes; 3 (D 3: 2): static, quota 0.5, every order of steps
                      10: shared, drops, D 1; 11: shared, D 2
    4 ranks           10: shared, drops, D 1; 14: shared, D 2, two classes

Why this is enough: a rank learns of the others only minima, sums and one prefix sum. So what can go wrong lies where a
rank has none, one, as many as, or more groups or samples than the target; has run out or not; is before, at or behind
the end of the cursor; and in each pair of these over two ranks. These worlds have room for each of them, and the floors
in `spaces.py` count the rare ones. A third rank adds minima that stem from different ranks, and a middle in the prefix
sum; a fourth a prefix sum that does not run in the order of the ranks. Worlds of up to 128 ranks are sampled in
`tests/core`.

Not covered here: failed ranks, bounds on samples and patches, bad samples above their limit, a run that is resumed
with its quota reached, kinds of the same length.
"""
