"""The only room that knows vLLM: build engines, generate, count, change k live, publish weights, mend known faults.

`core` the engine in this process, `process` the same in one of its own; `methods` speculation and what of it is
lossless; `steps` what a step did; `weights` ways to publish; `probe` what an engine holds; `faults` what is wrong with
the installed vLLM and its cures, `selftest` the same for `doctor`.
"""

from draftkit.engine.core import DraftTrace, Engine
from draftkit.engine.faults import cure_sampling
from draftkit.engine.methods import check_lossless, speculative_methods
from draftkit.engine.probe import expected_probe, probe_mismatches
from draftkit.engine.process import EngineProcess
from draftkit.engine.selftest import self_tests

__all__ = [
    "DraftTrace",
    "Engine",
    "EngineProcess",
    "check_lossless",
    "cure_sampling",
    "expected_probe",
    "probe_mismatches",
    "self_tests",
    "speculative_methods",
]
