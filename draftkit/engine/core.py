"""`Engine`: a vLLM engine in this process: generate, count, change k live, publish weights.

One process holds every engine (`VLLM_ENABLE_V1_MULTIPROCESSING=0`): a plain and a speculative one take turns, so that
arms of a comparison interleave within seconds.
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftkit.console import say_once
from draftkit.engine import faults
from draftkit.errors import UserError
from draftkit.models import native_bf16
from draftkit.recipe import EngineSection
from draftkit.types import Generation, Sampling, SpecConfig, SpecCounters

if TYPE_CHECKING:
    import torch

VLLM_METHOD = {"eagle3": "eagle3", "draft_model": "draft_model", "mtp": "mtp", "ngram": "ngram"}
NGRAM_LOOKUP_MAX = 4


def prepare_environment(recipe: EngineSection) -> None:
    """Settings that vLLM reads once, at import or at engine start. A value the user exported wins."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(recipe.kv_cache_gib)))


class Engine:
    """A vLLM engine in this process.

    model: directory of the verifier. spec: None for plain decoding. Prefix caching is off: rollouts of one prompt
    must not be faster because another arm ran before. Raises UserError when the drafter cannot be served.
    """

    def __init__(
        self, model: str | Path, *, recipe_engine: EngineSection, spec: SpecConfig | None = None, seed: int = 0
    ) -> None:
        prepare_environment(recipe_engine)
        from vllm import LLM
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            faults.register_kernels_once()
            faults.cure_sampling()
        self.spec = spec
        self.max_model_len = recipe_engine.max_model_len
        self.max_num_seqs = recipe_engine.max_num_seqs
        settings: dict[str, Any] = dict(
            model=str(model),
            seed=seed,
            max_model_len=recipe_engine.max_model_len,
            max_num_seqs=recipe_engine.max_num_seqs,
            enforce_eager=not recipe_engine.compiled,
            tensor_parallel_size=recipe_engine.tensor_parallel_size,
            enable_prefix_caching=False,
            skip_tokenizer_init=not (Path(model) / "tokenizer_config.json").exists(),
            disable_log_stats=False,
            use_tqdm_on_load=False,
            generation_config="vllm",  # the recipe's sampling settings, never defaults of the checkpoint
        )
        if current_platform.is_cpu():
            # A fourth fault of 0.32: a seeded request whose prompt is split over two steps rewinds its generator by an
            # offset that CPU generators do not have. Prompts are therefore never split.
            settings["enable_chunked_prefill"] = False
            if not native_bf16():
                settings["dtype"] = "float32"
                say_once("this CPU does not multiply bfloat16 natively: the engine computes in float32.")
            settings["max_num_batched_tokens"] = max(4096, recipe_engine.max_model_len)
        else:
            settings["gpu_memory_utilization"] = recipe_engine.gpu_memory_utilization
        if spec is not None:
            settings["speculative_config"] = self._speculative_config(spec)
            settings["per_request_spec_decode_metrics"] = "summary"
        self._counters = SpecCounters()
        self._llm = LLM(**settings)
        _OPEN.add(self)

    def _speculative_config(self, spec: SpecConfig) -> dict[str, Any]:
        if spec.method not in VLLM_METHOD:
            raise UserError(f"speculative method '{spec.method}' is not known.", f"Use one of {sorted(VLLM_METHOD)}.")
        config: dict[str, Any] = {"method": VLLM_METHOD[spec.method], "num_speculative_tokens": spec.k}
        if spec.method == "ngram":
            config["prompt_lookup_max"] = NGRAM_LOOKUP_MAX
        else:
            config["model"] = str(spec.model)
            config["draft_sample_method"] = spec.draft_sample_method
        # A schedule, even a constant one, is what lets `set_k` change the draft length of a running engine.
        config["num_speculative_tokens_per_batch_size"] = [(1, self.max_num_seqs, spec.k)]
        return config

    # ---- generate -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        *,
        max_concurrency: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Generation]:
        """Answer token-id prompts, one request each, in the order given.

        max_concurrency: most requests running at once (all are queued). progress(n) is called as n more finish.
        Raises UserError for a prompt that leaves no room for an answer.
        """
        samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        assert len(samplings) == len(prompts)
        self._scheduler.max_num_active_reqs = min(max_concurrency or self.max_num_seqs, self.max_num_seqs)
        # All checked before any is queued: a refused prompt must not leave its neighbours to the next call.
        params = [self._params(prompt, s) for prompt, s in zip(prompts, samplings, strict=True)]
        finished: dict[int, Generation] = {}
        try:
            for i, prompt in enumerate(prompts):
                self._llm.llm_engine.add_request(f"{i}", {"prompt_token_ids": list(prompt)}, params[i])
            while self._llm.llm_engine.has_unfinished_requests():
                before = len(finished)
                for output in self._llm.llm_engine.step():
                    if output.finished:
                        finished[int(output.request_id.split("-")[0])] = self._generation(output)
                if progress is not None and len(finished) > before:
                    progress(len(finished) - before)
        except BaseException:
            # Ctrl-C in the middle, or a prompt that vLLM refuses: leftovers would mix into the next call.
            self._llm.llm_engine.abort_request([str(i) for i in range(len(prompts)) if i not in finished])
            raise
        return [finished[i] for i in range(len(prompts))]

    def _params(self, prompt: Sequence[int], s: Sampling) -> Any:
        from vllm import SamplingParams

        # The drafter looks k + 1 tokens past the last one: stay that far from the end of the context.
        room = self.max_model_len - len(prompt) - ((self.spec.k + 1) if self.spec else 0)
        if room < 1:
            raise UserError(
                f"a prompt of {len(prompt)} tokens leaves no room for an answer in "
                f"engine.max_model_len={self.max_model_len}.",
                "Raise engine.max_model_len or drop the prompt.",
            )
        return SamplingParams(
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            max_tokens=min(s.max_tokens, room),
            stop=list(s.stop) or None,
            seed=s.seed if s.temperature > 0 else None,
            ignore_eos=s.ignore_eos,
            detokenize=bool(s.stop),
        )

    def _generation(self, output: Any) -> Generation:
        completion = output.outputs[0]
        metrics = completion.spec_decode_metrics
        spec = None if metrics is None else _request_counters(metrics.histogram, metrics.num_draft_tokens)
        if spec is not None:
            self._counters = self._counters + spec
        return Generation(
            prompt_ids=tuple(output.prompt_token_ids),
            response_ids=tuple(completion.token_ids),
            finish_reason=completion.finish_reason or "",
            spec=spec,
        )

    # ---- speculation --------------------------------------------------------------------------------------------

    @property
    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core

    @property
    def _scheduler(self) -> Any:
        return self._core.scheduler

    @property
    def _runner(self) -> Any:
        return self._core.model_executor.driver_worker.worker.model_runner

    def set_k(self, k: int) -> None:
        """Draft k tokens a round from now on, 1 <= k <= spec.k. (0 would still pay for a draft forward: use a plain
        engine as the k = 0 arm.)"""
        assert self.spec is not None and 1 <= k <= self.spec.k, k
        self._scheduler.dynamic_sd_lookup = [k] * len(self._scheduler.dynamic_sd_lookup)

    def set_schedule(self, schedule: Sequence[Sequence[int]]) -> None:
        """[[lo, hi, k], ...]: k by the number of running requests, as `num_speculative_tokens_per_batch_size`."""
        from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

        assert self.spec is not None
        self._scheduler.dynamic_sd_lookup = build_dynamic_sd_schedule_lookup(
            [tuple(row) for row in schedule],
            vllm_max_batch_size=self.max_num_seqs,
            vllm_num_speculative_tokens=self.spec.k,
        )

    def counters(self) -> SpecCounters:
        """Cumulative counters of finished requests since the engine started; subtract two snapshots. Summed here from
        the per-request records: vLLM's own counters are global to the process and mix the engines living in it."""
        return self._counters

    def time_parts(self) -> dict[str, float]:
        """Cumulative seconds spent drafting and in engine steps since `start_timing`: {"draft_s", "step_s"}.

        Wraps the drafter's `propose` on this engine only. On CPU the calls are synchronous, so wall time is exact.
        """
        if not hasattr(self, "_times"):
            self._times = {"draft_s": 0.0, "step_s": 0.0}
            if getattr(self._runner, "drafter", None) is not None:
                _timed(self._runner.drafter, "propose", self._times, "draft_s")
            _timed(self._core, "step_fn", self._times, "step_s")
        return dict(self._times)

    # ---- weights ------------------------------------------------------------------------------------------------

    def load_verifier(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the running verifier's weights in place (checkpoint names). `load_weights` alone would apply part of
        them and then fail on CPU, whose linear layers are packed: the layerwise reload unpacks and packs again."""
        self._runner.reload_weights(weights_iterator=iter(weights), is_checkpoint_format=True)
        self._llm.reset_prefix_cache()

    def load_drafter(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the running drafter's weights in place (checkpoint names)."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        assert self.spec is not None and self.spec.method != "ngram"
        module = self._runner.drafter.model
        initialize_layerwise_reload(module)
        module.load_weights(iter(weights))
        finalize_layerwise_reload(module, self._runner.vllm_config.speculative_config.draft_model_config)
        self._llm.reset_prefix_cache()

    def trace_drafts(self) -> list[DraftTrace]:
        """Record every round's proposed tokens from now on, for the parity check: rows append to the list returned."""
        trace: list[DraftTrace] = []
        runner = self._runner
        original = runner.drafter.propose

        def propose(*args: Any, **kwargs: Any) -> Any:
            drafts = original(*args, **kwargs)
            tokens = drafts[0] if isinstance(drafts, tuple) else drafts
            batch = runner.input_batch
            for row, request in enumerate(list(batch.req_ids)[: len(tokens)]):
                trace.append((request, [int(t) for t in tokens[row]]))
            return drafts

        runner.drafter.propose = propose
        return trace

    def close(self) -> None:
        """Free the engine's memory. vLLM tears the process's distributed state down with any engine; others that are
        open stand on it, so only the last one may."""
        from vllm.v1.engine import core

        _OPEN.discard(self)
        teardown = core.cleanup_dist_env_and_memory
        if _OPEN:
            core.cleanup_dist_env_and_memory = lambda: None
        try:
            self._llm.llm_engine.engine_core.shutdown()
        finally:
            core.cleanup_dist_env_and_memory = teardown
        del self._llm
        gc.collect()  # the KV cache sits in reference cycles

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


DraftTrace = tuple[str, list[int]]
_OPEN: weakref.WeakSet[Engine] = weakref.WeakSet()


def _timed(owner: Any, name: str, times: dict[str, float], key: str) -> None:
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            times[key] += time.perf_counter() - start

    setattr(owner, name, call)


def _request_counters(histogram: Sequence[int], num_draft_tokens: int) -> SpecCounters:
    """histogram[j] = rounds that accepted j draft tokens -> the counters of one request."""
    at_least = [sum(histogram[j:]) for j in range(1, len(histogram))]
    return SpecCounters(sum(histogram), num_draft_tokens, sum(at_least), tuple(at_least))
