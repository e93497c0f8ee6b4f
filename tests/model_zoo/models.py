"""All models by name: ``timm/...`` and ``huggingface/...``."""

from tests.model_zoo import huggingface_models, timm_models
from tests.model_zoo.calls import Factory

FACTORIES: dict[str, Factory] = {**timm_models.FACTORIES, **huggingface_models.FACTORIES}
