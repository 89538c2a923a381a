"""`Engine`: a vLLM engine in this process: generate, count, change k live, publish weights, show what it holds.

One process holds every engine (`VLLM_ENABLE_V1_MULTIPROCESSING=0`): a plain and a speculative one take turns, so that
arms of a comparison interleave within seconds. Another library's torch.distributed may live there too: an engine uses a
group of one process that exists, and leaves it when it closes.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftkit.console import say_once
from draftkit.engine import faults, methods
from draftkit.engine import weights as publishing
from draftkit.engine.sampling import plain_without_drafts
from draftkit.engine.steps import StepRecorder, outer_id
from draftkit.errors import UserError
from draftkit.models import native_bf16
from draftkit.recipe import EngineSection
from draftkit.types import EngineStep, Generation, Sampling, SpecConfig, SpecCounters

if TYPE_CHECKING:
    import torch

CPU_BLOCK = 32  # tokens of a prefix-cache block on CPU; vLLM's 128 would never hit on prompts of an RL run


def prepare_environment(recipe: EngineSection) -> None:
    """Settings that vLLM reads once, at import or at engine start. A value the user exported wins."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # the one with a drafter that can be paused and reloaded
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(recipe.kv_cache_gib)))


class Engine:
    """A vLLM engine in this process.

    model: directory of the verifier. spec: None for plain decoding; its target is served in place of `model`.
    can_sleep: make `sleep` possible on a GPU, where only one such engine fits into a process. Raises UserError when the
    drafter cannot be served.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        recipe_engine: EngineSection,
        spec: SpecConfig | None = None,
        seed: int = 0,
        can_sleep: bool = False,
    ) -> None:
        prepare_environment(recipe_engine)
        from vllm import LLM
        from vllm.platforms import current_platform

        self.device = "cpu" if current_platform.is_cpu() else current_platform.device_type
        if self.device == "cpu":
            faults.allow_amx()
            faults.register_kernels_once()
            faults.cure_sampling()
            faults.rank_without_compiling()
            faults.recover_faster()
        faults.cure_draft_seeds()
        if spec is not None:
            methods.check_lossless(spec)
        self.spec = spec
        self.max_model_len = recipe_engine.max_model_len
        self.max_num_seqs = recipe_engine.max_num_seqs
        self._tensor_parallel = recipe_engine.tensor_parallel_size
        self._can_sleep = can_sleep
        self.between_steps: Callable[[], None] = lambda: None  # may raise, to end a call of generate
        self._counters = SpecCounters()
        served = spec.target if spec is not None and spec.target is not None else str(model)
        self._llm = LLM(**self._settings(served, recipe_engine, seed))
        if spec is not None:
            methods.check_served_lossless(self._llm.llm_engine.vllm_config.speculative_config)
            if self._tensor_parallel == 1:
                plain_without_drafts(self._runner)
        drafter = getattr(self._runner, "drafter", None) if spec is not None and self._tensor_parallel == 1 else None
        self._steps = StepRecorder(self._scheduler, drafter)

    def _settings(self, model: str, recipe: EngineSection, seed: int) -> dict[str, Any]:
        settings: dict[str, Any] = dict(
            model=model,
            seed=seed,
            max_model_len=recipe.max_model_len,
            max_num_seqs=recipe.max_num_seqs,
            enforce_eager=not recipe.compiled,
            tensor_parallel_size=recipe.tensor_parallel_size,
            enable_prefix_caching=recipe.prefix_caching,
            skip_tokenizer_init=not (Path(model) / "tokenizer_config.json").exists(),
            disable_log_stats=False,
            use_tqdm_on_load=False,
            generation_config="vllm",  # the recipe's sampling settings, never defaults of the checkpoint
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from, as importance weights need
        )
        if self.device == "cpu":
            # A fourth fault of 0.32: a seeded request whose prompt is split over two steps rewinds its generator by an
            # offset that CPU generators do not have. Prompts are therefore never split.
            settings["enable_chunked_prefill"] = False
            settings["max_num_batched_tokens"] = max(4096, recipe.max_model_len)
            if recipe.prefix_caching:
                settings["block_size"] = CPU_BLOCK
            if not native_bf16():
                settings["dtype"] = "float32"
                say_once("this CPU does not multiply bfloat16 natively: the engine computes in float32.")
        else:
            settings["gpu_memory_utilization"] = recipe.gpu_memory_utilization
            settings["enable_sleep_mode"] = self._can_sleep
            if self._tensor_parallel > 1:
                settings["weight_transfer_config"] = {"backend": "ipc"}
        if self.spec is not None:
            settings["speculative_config"] = methods.speculative_config(self.spec, recipe.max_num_seqs)
            settings["per_request_spec_decode_metrics"] = "summary"
        return settings

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
                for output in self._steps.timed(self._llm.llm_engine.step):
                    if output.finished:
                        finished[int(outer_id(output.request_id))] = self._generation(output)
                if progress is not None and len(finished) > before:
                    progress(len(finished) - before)
                self.between_steps()
        except BaseException:
            # Ctrl-C in the middle, or a prompt that vLLM refuses: leftovers would mix into the next call.
            self._llm.llm_engine.abort_request([str(i) for i in range(len(prompts)) if i not in finished])
            self._steps.forget()
            raise
        return [finished[i] for i in range(len(prompts))]

    def _params(self, prompt: Sequence[int], s: Sampling) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

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
            min_tokens=s.min_tokens,
            stop=list(s.stop) or None,
            seed=s.seed if s.temperature > 0 else None,
            ignore_eos=s.ignore_eos,
            detokenize=bool(s.stop),
            logprobs=0 if s.logprobs else None,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _generation(self, output: Any) -> Generation:
        completion = output.outputs[0]
        record = self._steps.drafted.pop(outer_id(output.request_id))
        lengths = self._steps.lengths.pop(outer_id(output.request_id), Counter())
        spec = None if record is None else _request_counters(record.histogram, record.num_draft_tokens, lengths)
        if spec is not None:
            self._counters = self._counters + spec
        return Generation(
            prompt_ids=tuple(output.prompt_token_ids),
            response_ids=tuple(completion.token_ids),
            finish_reason=completion.finish_reason or "",
            spec=spec,
            logprobs=_sampled_logprobs(completion),
            num_cached=output.num_cached_tokens or 0,
        )

    # ---- the parts of vLLM that live in this process ------------------------------------------------------------

    @property
    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core

    @property
    def _scheduler(self) -> Any:
        return self._core.scheduler

    @property
    def _runner(self) -> Any:
        if self._tensor_parallel > 1:
            raise UserError(
                "a tensor-parallel engine keeps its model in other processes: this needs the model in this one.",
                "Set engine.tensor_parallel_size to 1.",
            )
        return self._core.model_executor.driver_worker.worker.model_runner

    @property
    def _draft_model(self) -> Any | None:
        return self._runner.get_draft_model() if self.spec is not None else None

    @property
    def dtype(self) -> torch.dtype:
        """What the engine rounds published weights to."""
        return self._llm.llm_engine.vllm_config.model_config.dtype

    # ---- speculation --------------------------------------------------------------------------------------------

    def set_k(self, k: int) -> None:
        """Draft k tokens a round from the next `generate` on, 0 <= k <= spec.k. 0 is plain decoding: the drafter does
        not run at all."""
        assert self.spec is not None and 0 <= k <= self.spec.k, k
        self._set_lookup([k] * len(self._scheduler.dynamic_sd_lookup))

    def set_schedule(self, schedule: Sequence[Sequence[int]]) -> None:
        """[[lo, hi, k], ...]: k by the number of running requests, as `num_speculative_tokens_per_batch_size`. Where
        some k is 0 and another is not, the drafter runs once a step at k = 0, to keep its cache in step."""
        from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

        assert self.spec is not None
        self._set_lookup(
            build_dynamic_sd_schedule_lookup(
                [tuple(row) for row in schedule],
                vllm_max_batch_size=self.max_num_seqs,
                vllm_num_speculative_tokens=self.spec.k,
            )
        )

    def _set_lookup(self, lookup: list[int]) -> None:
        assert not self._llm.llm_engine.has_unfinished_requests(), "k changes between two calls of generate only"
        paused = not any(lookup[1:])
        if self._steps.paused and not paused:
            self._llm.reset_prefix_cache()  # what was cached meanwhile has no drafter states
        self._steps.paused = paused
        self._scheduler.dynamic_sd_lookup = lookup

    def counters(self) -> SpecCounters:
        """Cumulative counters of finished requests since the engine started; subtract two snapshots. Summed here from
        the per-request records: vLLM's own counters are global to the process and mix the engines living in it."""
        return self._counters

    def step_log(self) -> list[EngineStep]:
        """Every engine step since the last call; the first call starts recording."""
        return self._steps.take()

    def aux_layers(self) -> tuple[int, ...] | None:
        """Layers of the verifier whose states the drafter is given, as the running model has them; None when it is
        given none."""
        from vllm.model_executor.models.interfaces import EagleModelMixin

        if not getattr(self._runner, "use_aux_hidden_state_outputs", False):
            return None
        [layers] = {
            m.aux_hidden_state_layers for m in self._runner.get_model().modules() if isinstance(m, EagleModelMixin)
        }
        return tuple(layers)

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

    def generate_traced(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]
    ) -> tuple[list[Generation], list[list[list[int]]]]:
        """`generate`, and for each answer the tokens proposed in its rounds, in order. Not for a timed window."""
        drafter = self._runner.drafter
        untraced = drafter.propose
        trace = self.trace_drafts()
        try:
            answers = self.generate(prompts, sampling)
        finally:
            drafter.propose = untraced
        proposed: list[list[list[int]]] = [[] for _ in prompts]
        for request, tokens in trace:
            proposed[int(outer_id(request))].append(tokens)
        return answers, proposed

    # ---- weights ------------------------------------------------------------------------------------------------

    def load_verifier(self, weights: publishing.Weights) -> None:
        """Replace the running verifier's weights in place (checkpoint names)."""
        self._load(weights, draft=False)

    def load_drafter(self, weights: publishing.Weights) -> None:
        """Replace the running drafter's weights in place (checkpoint names). What it shares with the verifier stays
        the verifier's, whatever `weights` holds."""
        assert self.spec is not None and self.spec.method != "ngram"
        self._load(weights, draft=True)

    def _load(self, weights: publishing.Weights, *, draft: bool) -> None:
        workers_here = self._tensor_parallel == 1
        path = publishing.choose_path(self._llm, device=self.device, workers_here=workers_here, draft=draft)
        try:
            if path == "session":
                publishing.send(self._llm, weights, draft=draft, devices=self._tensor_parallel)
                return
            verifier, config = self._runner.get_model(), self._llm.llm_engine.vllm_config
            if draft:
                owned = publishing.without_shared(weights, verifier, self._draft_model)
                model_config = config.speculative_config.draft_model_config
                publishing.reload(self._draft_model, model_config, config, owned)
            else:
                publishing.reload(verifier, config.model_config, config, weights)
        finally:
            self._llm.reset_prefix_cache()

    def probe(self, columns: int | None = None) -> dict[str, torch.Tensor]:
        """What the engine holds, for `probe_mismatches` with `expected_probe`: see `probe.held`."""
        from draftkit.engine import probe

        return probe.held(self._runner.get_model(), self._draft_model, columns)

    # ---- rest and end -------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Free the device for the trainer, keeping verifier and drafter in host memory. On CPU there is nothing to
        move, and vLLM has no sleep: a no-op, said once."""
        if level != 1:
            raise UserError(
                f"sleep level {level} is refused: it drops the drafter's weights, which nothing would load again.",
                "Use level 1.",
            )
        if self.device == "cpu":
            say_once("on CPU an engine does not sleep: trainer and engine share the memory and take turns.")
            return
        if not self._can_sleep:
            raise UserError("this engine was built without sleep mode.", "Build it with can_sleep=True.")
        self._llm.sleep(level=1)

    def wake(self) -> None:
        if self.device != "cpu":
            self._llm.wake_up()

    def close(self) -> None:
        """Free the engine's memory, and no more: vLLM would tear down the process's torch.distributed with it, on
        which other engines and the trainer stand."""
        from vllm.v1.engine import core

        teardown = core.cleanup_dist_env_and_memory
        core.cleanup_dist_env_and_memory = lambda: None
        try:
            self._llm.llm_engine.engine_core.shutdown()
        finally:
            core.cleanup_dist_env_and_memory = teardown
        del self._llm, self._steps
        gc.unfreeze()
        gc.collect()  # the KV cache sits in reference cycles
        if self.device != "cpu":
            import torch

            torch.accelerator.empty_cache()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


DraftTrace = tuple[str, list[int]]


def _request_counters(histogram: Sequence[int], num_draft_tokens: int, lengths: Counter[int]) -> SpecCounters:
    """A request's, from how many rounds accepted j draft tokens (histogram[j]) and how many drafted j (lengths[j])."""
    at_least = [sum(histogram[j:]) for j in range(1, len(histogram))]
    drafted = [sum(count for length, count in lengths.items() if length >= j) for j in range(1, len(histogram))]
    return SpecCounters(sum(histogram), num_draft_tokens, sum(at_least), tuple(at_least), tuple(drafted))


def _sampled_logprobs(completion: Any) -> tuple[float, ...] | None:
    """Of every position the first entry, which is the sampled token's."""
    flat = completion.logprobs
    if flat is None:
        return None
    values = tuple(flat.logprobs[start] for start in flat.start_indices)
    assert len(values) == len(completion.token_ids)
    return values
