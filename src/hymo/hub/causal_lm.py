"""HyMo behind the interface of transformers' causal language models: loss, logits, generation with a cache.

Shape suffixes: B texts, T tokens, C width, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from hymo.checkpoint.export import KEPT_FLOAT32
from hymo.config import ModelConfig
from hymo.hub.cache import HyMoCache
from hymo.models.init import initialize_
from hymo.models.model import HyMo

# Later versions of transformers 5 say `cache` for what was `past_key_values`.
_CACHE = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)


class HyMoHubConfig(PreTrainedConfig):
    """``model``: the section of that name of HyMo's configuration. ``origin``: which checkpoint the weights are of.

    The names that transformers knows (``hidden_size``, ``vocab_size``, ...) are for those who read; ``model`` decides.
    """

    model_type = "hymo"
    keys_to_ignore_at_inference = ("cache", "past_key_values")

    def __init__(
        self, model: Mapping[str, Any] | None = None, origin: Mapping[str, Any] | None = None, **settings: Any
    ):
        shape = ModelConfig(**(model or {}))
        self.model, self.origin = shape.model_dump(mode="json"), dict(origin or {})
        settings |= {
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.dim,
            "num_hidden_layers": shape.n_layers,
            "tie_word_embeddings": shape.tie_embeddings,
        }
        super().__init__(**settings)


class HyMoForCausalLM(PreTrainedModel, GenerationMixin):
    """The model of ``hymo export``. ``self.model`` is the `HyMo` itself.

    The main head alone: multi-token prediction is loaded and saved, and neither computed nor trained here. Expert
    biases stay as they are.
    """

    config_class = HyMoHubConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _is_stateful = True  # a recurrent state cannot be taken back, so no assisted generation
    _no_split_modules = ["GatedDeltaNetBlock", "MLABlock"]  # noqa: RUF012
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012
    _keep_in_fp32_modules_strict = list(KEPT_FLOAT32)  # noqa: RUF012

    def __init__(self, config: HyMoHubConfig):
        super().__init__(config)
        self.model = HyMo(ModelConfig(**config.model))
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cache: HyMoCache | None = None,
        past_key_values: HyMoCache | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        **for_the_loss: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of every token, or of the last ``logits_to_keep``.

        Args:
            input_ids: int64 [B, T].
            attention_mask: [B, T], 1 for a text's tokens, which must be contiguous; what fills a row up is not seen.
                With a cache the texts must end in the last column (fill up on the left).
            labels: as ``input_ids``, -100 = none; shifted here. ``loss`` is their mean cross entropy in nats.
            use_cache: return a cache to go on from. No gradients then.
            cache, past_key_values: one to go on from: ``input_ids`` are then the tokens after those it has read.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("inputs_embeds: found embeddings, or no input_ids; accepted: input_ids")
        if position_ids is not None:
            raise ValueError(
                "position_ids: found some; accepted: none, a text counts from 0 (attention_mask says where)"
            )
        state = cache if cache is not None else past_key_values
        if state is None and use_cache:
            state = HyMoCache()
        if state is not None and not isinstance(state, HyMoCache):
            raise ValueError(f"{_CACHE}: found {type(state).__name__}; accepted: a HyMoCache that this model returned")
        keep = slice(-logits_to_keep, None) if logits_to_keep else slice(None)
        if state is None:
            hidden_BTC = self.model.forward_with_hidden(input_ids, _documents(attention_mask, input_ids), depth=0)[0]
            logits_BTV = self.model.head.logits(hidden_BTC[:, keep])
        else:
            logits_BTV = self._read(state, input_ids, attention_mask, keep)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits_BTV, labels=labels, vocab_size=self.config.vocab_size, **for_the_loss
            )
        fields: dict[str, Any] = {"loss": loss, "logits": logits_BTV, _CACHE: state}
        output = CausalLMOutputWithPast(**fields)
        return output.to_tuple() if return_dict is False else output

    @torch.no_grad()
    def _read(self, state: HyMoCache, input_ids: Tensor, attention_mask: Tensor | None, keep: slice) -> Tensor:
        if state.columns:  # the mask was looked at when the prompts were read; what follows are tokens
            logits = [state.read_one(self.model, tokens_B) for tokens_B in input_ids.unbind(1)]
            return torch.stack(logits, 1)[:, keep]
        starts_B, ends_B = _spans(attention_mask, input_ids)
        if not bool((ends_B == input_ids.shape[1]).all()):
            raise ValueError(
                "attention_mask: found texts that are filled up on the right; accepted with a cache: on the left "
                "(tokenizer.padding_side = 'left')"
            )
        return self.model.head.logits(state.read_prompts(self.model, input_ids, starts_B)[:, keep])

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        use_cache: bool = True,
        inputs_embeds: Tensor | None = None,
        **given: Any,
    ) -> dict[str, Any]:
        """The tokens that the cache has not read yet."""
        state = given.get(_CACHE)
        seen = 0 if state is None else state.get_seq_length()
        return {
            "input_ids": input_ids[:, seen:].contiguous(),
            "attention_mask": None if seen else attention_mask,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
            "logits_to_keep": 1,
            _CACHE: state,
        }

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the forward pass makes the cache of this model

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """HyMo's own initialisation of what was not loaded, drawn from torch's seed (``torch.manual_seed``)."""

        def loaded(tensor: Tensor) -> bool:
            return getattr(tensor, "_is_hf_initialized", False)

        if all(loaded(tensor) for tensor in (*self.parameters(), *self.buffers())):
            return
        kept = [(buffer, buffer.clone()) for buffer in self.buffers() if loaded(buffer)]
        seed = torch.initial_seed() % 2**63
        initialize_(self.model, seed, lambda p: [] if loaded(p) else [(p, 0, 0, p.shape[0])])
        for buffer, value in kept:
            buffer.copy_(value)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: torch.nn.Module) -> None:
        raise NotImplementedError("embeddings cannot be replaced; accepted: the vocabulary the model was trained with")

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("embeddings cannot be resized; accepted: the vocabulary the model was trained with")


def _spans(attention_mask: Tensor | None, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Where each row's text begins and ends, int64 [B]. Raises ValueError for a mask with holes or an empty row."""
    batch, length = input_ids.shape
    if attention_mask is None:
        zeros_B = torch.zeros(batch, dtype=torch.int64, device=input_ids.device)
        return zeros_B, zeros_B + length
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask: found shape {list(attention_mask.shape)}; accepted: that of input_ids, {[batch, length]}"
        )
    seen_BT = attention_mask != 0
    counts_B = seen_BT.sum(1)
    starts_B = seen_BT.int().argmax(1)
    ends_B = starts_B + counts_B
    last_B = length - seen_BT.flip(1).int().argmax(1)
    if bool((counts_B == 0).any()) or bool((last_B != ends_B).any()):
        raise ValueError(
            "attention_mask: found a row of zeros alone or one with a hole; accepted: one run of ones in each row "
            "(the state of a recurrence passes over no gap)"
        )
    return starts_B, ends_B


def _documents(attention_mask: Tensor | None, input_ids: Tensor) -> Tensor | None:
    """Document ids int32 [B, T]: what fills a row up before and after its text is a document of its own."""
    if attention_mask is None:
        return None
    starts_B, ends_B = _spans(attention_mask, input_ids)
    if bool((ends_B - starts_B == input_ids.shape[1]).all()):
        return None
    t = torch.arange(input_ids.shape[1], device=input_ids.device)
    return ((t >= starts_B[:, None]).int() + (t >= ends_B[:, None]).int()).int()
