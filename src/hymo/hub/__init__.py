"""HyMo for `transformers`: import this package, and the Auto classes know the models of ``hymo export``.

    import hymo.hub
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(DIR)
    tokenizer = AutoTokenizer.from_pretrained(DIR)

No code is read from DIR. Nothing else of hymo imports transformers.
"""

try:
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as error:
    raise ImportError("hymo.hub needs transformers 5 or newer: pip install 'hymo[hub]'") from error

from hymo.hub.causal_lm import HyMoForCausalLM, HyMoHubConfig

__all__ = ["HyMoForCausalLM", "HyMoHubConfig"]

AutoConfig.register(HyMoHubConfig.model_type, HyMoHubConfig, exist_ok=True)
AutoModelForCausalLM.register(HyMoHubConfig, HyMoForCausalLM, exist_ok=True)
