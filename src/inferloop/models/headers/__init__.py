"""What a model file says about itself, read without loading a weight."""

from __future__ import annotations

from inferloop.models.headers.header import ModelHeader, RopeSpec, TensorInfo
from inferloop.models.headers.read import read_header

__all__ = ["read_header", "ModelHeader", "RopeSpec", "TensorInfo"]
