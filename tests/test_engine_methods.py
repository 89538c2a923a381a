"""What an engine may be asked for, without building one: lossless acceptance, and the way weights are published."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftkit.engine import Engine, check_lossless, methods, weights
from draftkit.errors import UserError
from draftkit.recipe import EngineSection
from draftkit.types import SpecConfig

pytestmark = pytest.mark.engine  # vLLM's own lists are read, which imports it


def spec(**changes: Any) -> SpecConfig:
    return SpecConfig(**({"method": "eagle3", "model": "drafter", "k": 3} | changes))


# ---- acceptance ----------------------------------------------------------------------------------------------------


def test_the_default_of_this_vllm_is_lossless():
    check_lossless(spec())
    check_lossless(spec(rejection_sample_method="standard"))


def test_every_other_acceptance_method_is_refused_by_name():
    known, _ = methods.acceptance_methods()
    assert {"standard", "synthetic"} <= known
    for name in (known - {"standard"}) | {"typical_acceptance_sampler", "lenient", "strict"}:
        with pytest.raises(UserError, match=f"rejection_sample_method '{name}' is refused.*Allowed .*: standard"):
            check_lossless(spec(rejection_sample_method=name))


def test_the_names_of_another_version_are_its_own(monkeypatch):
    monkeypatch.setattr(methods, "acceptance_methods", lambda: ({"strict", "probabilistic", "synthetic"}, "strict"))
    for name in (None, "strict", "probabilistic"):
        check_lossless(spec(rejection_sample_method=name))
    for name in ("synthetic", "standard"):
        with pytest.raises(UserError, match=f"'{name}' is refused"):
            check_lossless(spec(rejection_sample_method=name))
    # A version whose default is lossy, or new, is refused until someone has looked at it.
    monkeypatch.setattr(methods, "acceptance_methods", lambda: ({"standard", "lenient"}, "lenient"))
    with pytest.raises(UserError, match="'lenient' is refused: it is not known to keep the policy's distribution"):
        check_lossless(spec())


def test_an_engine_refuses_before_it_loads_anything(tmp_path):
    with pytest.raises(UserError, match="'synthetic' is refused"):
        Engine(tmp_path / "none", recipe_engine=EngineSection(), spec=spec(rejection_sample_method="synthetic"))
    with pytest.raises(UserError, match="speculative method 'medusa' is not known"):
        Engine(tmp_path / "none", recipe_engine=EngineSection(), spec=spec(method="medusa"))


@pytest.mark.parametrize(
    ("method", "named"),
    [("eagle3", "eagle3"), ("mtp", "mtp"), ("draft-lm", "draft_model"), ("draft_model", "draft_model")],
)
def test_methods_have_vllms_names(method, named):
    check_lossless(spec(method=method))
    config = methods.speculative_config(spec(method=method), 16)
    assert config["method"] == named and config["draft_sample_method"] == "greedy"
    assert config["num_speculative_tokens_per_batch_size"] == [(1, 16, 3)]


def test_ngram_and_a_built_in_mtp_head_need_no_drafter_directory():
    assert "model" not in methods.speculative_config(spec(method="ngram", model=None), 4)
    assert "model" not in methods.speculative_config(spec(method="mtp", model=None), 4)


# ---- publishing ----------------------------------------------------------------------------------------------------


class FakeLLM:
    """Records the calls of a weight-update session."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init_weight_transfer_engine(self, request: dict) -> None:
        self.calls.append(("init", request))

    def start_weight_update(self) -> None:
        self.calls.append(("start", None))

    def start_draft_weight_update(self) -> None:
        self.calls.append(("start draft", None))

    def update_weights(self, request: dict) -> None:
        self.calls.append(("update", request["update_info"]["names"]))

    def finish_weight_update(self) -> None:
        self.calls.append(("finish", None))


class OldLLM:
    """A vLLM whose session cannot reach the drafter."""

    init_weight_transfer_engine = start_weight_update = update_weights = finish_weight_update = None


def test_a_model_in_this_process_is_reloaded_and_one_elsewhere_gets_a_session():
    for device in ("cpu", "cuda"):
        assert weights.choose_path(FakeLLM(), device=device, workers_here=True, draft=True) == "reload"
    assert weights.choose_path(FakeLLM(), device="cuda", workers_here=False, draft=True) == "session"
    assert weights.choose_path(OldLLM(), device="cuda", workers_here=False, draft=False) == "session"


def test_what_cannot_be_published_is_refused_with_the_reason():
    with pytest.raises(UserError, match="has no start_draft_weight_update"):
        weights.choose_path(OldLLM(), device="cuda", workers_here=False, draft=True)
    with pytest.raises(UserError, match="CUDA IPC, and this is cpu.*tensor_parallel_size"):
        weights.choose_path(FakeLLM(), device="cpu", workers_here=False, draft=False)


@pytest.mark.parametrize("draft", [False, True])
def test_a_session_is_opened_filled_and_closed(draft, monkeypatch):
    monkeypatch.setattr(weights, "_handles", lambda chunk, devices: ([{}] * len(chunk), []))
    monkeypatch.setattr(weights, "CHUNK_BYTES", 100)
    llm = FakeLLM()
    weights.send(llm, [(str(i), torch.zeros(10)) for i in range(5)], draft=draft, devices=2)
    assert llm.calls == [
        ("init", {"init_info": {"packed": False}}),
        ("start draft" if draft else "start", None),
        ("update", ["0", "1"]),
        ("update", ["2", "3"]),
        ("update", ["4"]),
        ("finish", None),
    ]


def test_a_tensor_larger_than_a_chunk_goes_alone():
    sizes = [1, 1, 50, 1, 2]
    made = weights.chunks([(str(n), torch.zeros(n, dtype=torch.uint8)) for n in sizes], 3)
    assert [[t.numel() for _, t in chunk] for chunk in made] == [[1, 1], [50], [1, 2]]
