# SPDX-License-Identifier: Apache-2.0
"""How close the GPU path comes to the hardware: four questions, each with its reference.

1. `kernels`: gather and scatter, beside a device copy of the same bytes.
2. `transfers`: STORE and RETRIEVE of chunks, beside a plain copy between GPU and pinned memory.
3. `transfers`: RETRIEVE alone, many times: the median and the slowest of a hundred.
4. `decode`: a loop of matrix products, in place of an engine's decode step, with and without
   concurrent stores.

`timing` excludes the time of Python; `rows` has layouts, figures and targets; `plot` draws them;
`run` does all of it. Tests on a machine without a GPU run all of this on the CPU.
"""
