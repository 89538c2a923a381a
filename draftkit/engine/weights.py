"""New weights for a running engine: which of vLLM's ways fits, and what has to be mended after it.

`reload`: the layerwise reload of vLLM, on the model in this process. `load_weights` alone would apply part of the
weights and then fail on CPU, whose linear layers are packed: the reload unpacks and packs again. It reads tensors where
they are, so it is also the way on a GPU whose worker lives here.
`session`: vLLM's weight-update session by CUDA IPC, for workers in processes of their own (tensor parallel on GPUs).
Handles of one process cannot be opened in the same process, so it is no alternative to the first. Written against
vLLM 0.32 and tested on its order of calls; no GPU was there to run it on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from draftkit.errors import UserError

if TYPE_CHECKING:
    import torch

Weights = Iterable[tuple[str, "torch.Tensor"]]
CHUNK_BYTES = 1 << 28  # of one session call
SESSION = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


def choose_path(llm: Any, *, device: str, workers_here: bool, draft: bool) -> Literal["reload", "session"]:
    """The way to publish, by what this engine is and what the installed vLLM offers."""
    if workers_here:
        return "reload"
    needed = (*SESSION, "start_draft_weight_update") if draft else SESSION
    missing = [name for name in needed if not hasattr(llm, name)]
    if device == "cuda" and not missing:
        return "session"
    why = f"vLLM's LLM has no {missing[0]}" if missing else f"the session works by CUDA IPC, and this is {device}"
    raise UserError(
        f"the weights of a tensor-parallel engine cannot be updated here: {why}.",
        "Set engine.tensor_parallel_size to 1.",
    )


# ---- reload ---------------------------------------------------------------------------------------------------------


def reload(module: Any, model_config: Any, vllm_config: Any, weights: Weights) -> list[str]:
    """Replace a model's weights in place (checkpoint names); returns what `repack_tied_heads` mended. Layers that
    `weights` does not name keep theirs, also when it raises midway. Tensors may be referred to until their whole layer
    has arrived: do not reuse their memory."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with set_current_vllm_config(vllm_config):
        initialize_layerwise_reload(module)
        try:
            module.load_weights(iter(weights))
        finally:
            finalize_layerwise_reload(module, model_config)
    return repack_tied_heads(module)


def repack_tied_heads(module: Any) -> list[str]:
    """Pack every LM head anew; returns the paths of those that were visibly stale.

    A fifth fault of vLLM 0.32 on CPU: the reload writes the embedding, and with it a tied head's weight, but not the
    packed copy that the head multiplies with, so the engine goes on with the old head. Always mended: one optimizer
    step changes a head by less than `is_stale` can tell from rounding.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    mended = []
    for path, head in module.named_modules():
        if isinstance(head, ParallelLMHead) and hasattr(head, "cpu_linear"):
            if is_stale(head):
                mended.append(path)
            head.quant_method.process_weights_after_loading(head)
    return mended


def is_stale(head: Any) -> bool:
    """Whether a head's kernel gives other logits than its weight."""
    import torch

    with torch.inference_mode():
        made = torch.Generator().manual_seed(0)
        x = torch.randn(1, head.embedding_dim, generator=made).to(head.weight.dtype)
        right, served = x.float() @ head.weight.float().T, head.quant_method.apply(head, x).float()
        return bool((right - served).abs().max() > 0.02 * right.abs().max())


def without_shared(weights: Weights, verifier: Any, drafter: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Leaves out what a drafter's checkpoint repeats of the verifier: loaded, it would overwrite the verifier's own."""
    theirs = {id(module) for module in verifier.modules()}
    shared = [path.rpartition(".")[2] for path, module in drafter.named_modules() if id(module) in theirs]
    shared = [name for name in shared if name in ("embed_tokens", "lm_head")]
    for name, tensor in weights:
        if not any(name.endswith(f"{module}.weight") for module in shared):
            yield name, tensor


# ---- session --------------------------------------------------------------------------------------------------------


def send(llm: Any, weights: Weights, *, draft: bool, devices: int) -> None:
    """One weight-update session: every tensor is copied to each of the workers' devices and handed over by handle."""
    llm.init_weight_transfer_engine({"init_info": {"packed": False}})  # once would do; it opens no connection
    (llm.start_draft_weight_update if draft else llm.start_weight_update)()
    for chunk in chunks(weights, CHUNK_BYTES):
        handles, kept = _handles(chunk, devices)
        info = {
            "names": [name for name, _ in chunk],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
            "shapes": [list(tensor.shape) for _, tensor in chunk],
            "ipc_handles": handles,
        }
        llm.update_weights({"update_info": info})
        del kept  # the copies must live until the workers have read them
    llm.finish_weight_update()


def chunks(weights: Weights, most_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Runs of tensors, in order, of at most so many bytes unless one alone is larger."""
    chunk: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        if chunk and size + tensor.nbytes > most_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append((name, tensor))
        size += tensor.nbytes
    if chunk:
        yield chunk


def _handles(chunk: list[tuple[str, torch.Tensor]], devices: int) -> tuple[list[dict[str, tuple]], list[torch.Tensor]]:
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    handles, kept = [], []
    for _, tensor in chunk:
        of_devices = {}
        for device in range(devices):
            copy = tensor.detach().to(f"cuda:{device}").contiguous()
            kept.append(copy)
            of_devices[str(torch.cuda.get_device_properties(device).uuid)] = reduce_tensor(copy)[1]
        handles.append(of_devices)
    return handles, kept
