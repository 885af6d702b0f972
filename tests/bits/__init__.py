"""Hashes of what the package computes, to show that a change of its structure changed no bit.

    python -m tests.bits --write before.txt           at one commit
    python -m tests.bits --against before.txt         at another: names what differs, and exits with 1
    python -m tests.bits --package FOLDER             the same cases over the vblackwell of another checkout

One line a case, ``name  hash``. Only public names are used (vblackwell's own and the `vb` command). Everything runs on
the CPU with one thread a process, where results repeat bit by bit on one machine with one version of torch; hashes of
two machines are not compared.

The cases:
    train     the run of `make train`, shorter; checkpoints and what a resumed run writes; other flags of `vb train`
    offload   training through a stack, each way it can be placed, clipped, updated and stored
    modules   layers, conversions, two parts: outputs and gradients
    codec     every format, search and two shapes
    packed    the folders of `vb quantize`, in every format
    generate  text of `vb generate`: greedy, drawn, streamed, packed
    estimate  the numbers of `vb estimate` and `VGPUResourceEstimator`, to the byte
"""
