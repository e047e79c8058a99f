"""Trained models in the Hugging Face ecosystem: importing this package registers them with the Auto classes."""

from megamem.hf.version import check_transformers

check_transformers()

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from megamem.hf.cache import MegamemCache  # noqa: E402
from megamem.hf.configuration import MegamemConfig  # noqa: E402
from megamem.hf.modeling import MegamemForCausalLM  # noqa: E402

AutoConfig.register(MegamemConfig.model_type, MegamemConfig, exist_ok=True)
AutoModelForCausalLM.register(MegamemConfig, MegamemForCausalLM, exist_ok=True)

__all__ = ["MegamemCache", "MegamemConfig", "MegamemForCausalLM"]
