"""Models: a package per architecture; config, parameters, and a forward pass built from operators."""

from ninfer.models.load import load
from ninfer.models.model import Batch, Cache, KvLayout, Model, Predictor, Records, StateLayout

__all__ = ["Batch", "Cache", "KvLayout", "Model", "Predictor", "Records", "StateLayout", "load"]
