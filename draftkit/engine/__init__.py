"""The only room that knows vLLM: build engines, generate, count, change k live, publish weights, mend known faults.

`core` the engine in this process; `faults` what is wrong with the installed vLLM and its cures; `selftest` the same for
`doctor`; `methods` speculative methods.

Left out: tensor-parallel weight transfer by NCCL / CUDA IPC (no accelerator to run it on; see README).
"""

from draftkit.engine.core import DraftTrace, Engine
from draftkit.engine.faults import cure_sampling
from draftkit.engine.methods import speculative_methods
from draftkit.engine.selftest import self_tests

__all__ = ["DraftTrace", "Engine", "cure_sampling", "self_tests", "speculative_methods"]
